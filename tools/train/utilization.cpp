#include "train/utilization.h"

#include <tessera/comm.h>

#include <dlfcn.h>
#include <unistd.h>

#include <cctype>
#include <set>

namespace tessera::train {
namespace {

struct Peak {
  const char* words;  // of a name; the first that fits counts
  double flops;
};
constexpr Peak kPeaks[] = {
    {"B200", 2250e12}, {"H200", 989e12},  {"H100 PCIe", 756e12}, {"H100 NVL", 835e12},
    {"H100", 989e12},  {"GH200", 989e12}, {"A100", 312e12},      {"A800", 312e12},
    {"L40S", 362e12},  {"L40", 181e12},   {"L4", 121e12},        {"A40", 150e12},
    {"A10G", 70e12},   {"A10", 125e12},   {"RTX 4090", 165e12},  {"RTX 3090", 71e12},
};

/// As whole words: "A100" is not in "RTX A1000".
bool has_words(const std::string& name, const std::string& words) {
  const auto at = name.find(words);
  if (at == std::string::npos) return false;
  const auto is_part = [&](size_t place) {
    return place < name.size() && std::isalnum(static_cast<unsigned char>(name[place])) != 0;
  };
  return !(at > 0 && is_part(at - 1)) && !is_part(at + words.size());
}

/// The driver's functions take plain numbers: no header of CUDA's is needed. It is in the process
/// already, libtorch has loaded it.
std::string cuda_device_name(int index) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) return "";
  using Initialise = int(unsigned);
  using Find = int(int*, int);
  using Name = int(char*, int, int);
  auto* const initialise = reinterpret_cast<Initialise*>(dlsym(driver, "cuInit"));
  auto* const find = reinterpret_cast<Find*>(dlsym(driver, "cuDeviceGet"));
  auto* const name = reinterpret_cast<Name*>(dlsym(driver, "cuDeviceGetName"));
  char text[256] = {};
  int device = 0;
  const bool is_told = initialise != nullptr && find != nullptr && name != nullptr &&
                       initialise(0) == 0 && find(&device, index) == 0 &&
                       name(text, sizeof text - 1, device) == 0;
  dlclose(driver);
  return is_told ? text : "";
}

}  // namespace

double flops_per_token(const ModelShape& shape) {
  const auto width = static_cast<double>(shape.width);
  const auto blocks = static_cast<double>(shape.blocks);
  // qkv, projection, up and down of each block; the head. Looking embeddings up multiplies nothing.
  const double weights =
      blocks * 12 * width * width + width * static_cast<double>(shape.vocabulary);
  return 6 * weights + 12 * blocks * width * static_cast<double>(shape.context);
}

std::optional<double> peak_flops(const std::string& name) {
  for (const auto& peak : kPeaks) {
    if (has_words(name, peak.words)) return peak.flops;
  }
  return std::nullopt;
}

std::string device_name(c10::Device device) {
  return device.is_cuda() ? cuda_device_name(device.index()) : "";
}

std::optional<double> peak_of_all(c10::Device device, const std::string& precision) {
  const auto name = device_name(device);
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  // A name of each device that is used: its host, its index, and what it is.
  const auto own = std::string(host) + "\n" + std::to_string(device.index()) + "\n" + name;
  double sum = 0;
  const auto all = gather_bytes(own);
  for (const auto& each : std::set<std::string>(all.begin(), all.end())) {
    const auto peak = peak_flops(each.substr(each.rfind('\n') + 1));
    if (!peak || precision == "fp32") return std::nullopt;
    sum += *peak;
  }
  return sum;
}

}  // namespace tessera::train
