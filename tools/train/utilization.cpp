#include "train/utilization.h"

#include <tessera/comm.h>

#include <ATen/ATen.h>
#include <dlfcn.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>

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

/// What the driver calls a GPU, and 16 bytes that no other has; empty what it does not tell. Its
/// functions take plain numbers: no header of CUDA's is needed. It is in the process already,
/// libtorch has loaded it.
struct DriverNames {
  std::string name, uuid;
};

DriverNames driver_names(int index) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) return {};
  using Initialise = int(unsigned);
  using Find = int(int*, int);
  using Name = int(char*, int, int);
  using Uuid = int(char*, int);
  auto* const initialise = reinterpret_cast<Initialise*>(dlsym(driver, "cuInit"));
  auto* const find = reinterpret_cast<Find*>(dlsym(driver, "cuDeviceGet"));
  auto* const name_of = reinterpret_cast<Name*>(dlsym(driver, "cuDeviceGetName"));
  auto* const uuid_of = reinterpret_cast<Uuid*>(dlsym(driver, "cuDeviceGetUuid_v2"));
  char name[256] = {}, uuid[16] = {};
  int device = 0;
  const bool is_there =
      initialise != nullptr && find != nullptr && initialise(0) == 0 && find(&device, index) == 0;
  DriverNames names;
  if (is_there && name_of != nullptr && name_of(name, sizeof name - 1, device) == 0)
    names.name = name;
  if (is_there && uuid_of != nullptr && uuid_of(uuid, device) == 0)
    names.uuid = std::string(uuid, sizeof uuid);
  dlclose(driver);
  return names;
}

std::string hexadecimal(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

}  // namespace

double flops_per_token(const TokenWork& work) {
  return 6 * work.weights - 2 * work.frozen +
         12 * static_cast<double>(work.blocks) * static_cast<double>(work.attention_width) *
             static_cast<double>(work.context);
}

std::optional<double> peak_flops(const std::string& name) {
  for (const auto& peak : kPeaks) {
    if (has_words(name, peak.words)) return peak.flops;
  }
  return std::nullopt;
}

std::vector<UsedDevice> merge_devices(const std::vector<UsedDevice>& by_rank) {
  std::vector<UsedDevice> merged;
  for (const auto& device : by_rank) {
    const auto known = std::ranges::find(merged, device.uuid, &UsedDevice::uuid);
    if (known == merged.end()) {
      merged.push_back(device);
    } else {
      known->ranks += device.ranks;
    }
  }
  return merged;
}

std::vector<UsedDevice> used_devices(c10::Device device) {
  if (device.is_cpu()) return {};
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  const int index = device.index();
  const auto names = driver_names(index);
  const auto uuid = names.uuid.empty() ? std::string(host) + ":" + std::to_string(index)
                                       : hexadecimal(names.uuid);
  const nlohmann::json own = {uuid, names.name, std::string(host), index};
  std::vector<UsedDevice> by_rank;
  for (const auto& text : gather_bytes(own.dump())) {
    const auto told = nlohmann::json::parse(text);
    by_rank.push_back({.uuid = told[0], .name = told[1], .host = told[2], .index = told[3]});
  }
  return merge_devices(by_rank);
}

std::optional<double> peak_of(const std::vector<UsedDevice>& devices,
                              const std::string& precision) {
  if (devices.empty() || precision == "fp32") return std::nullopt;
  double sum = 0;
  for (const auto& device : devices) {
    const auto peak = peak_flops(device.name);
    if (!peak) return std::nullopt;
    sum += *peak;
  }
  return sum;
}

double measured_peak(c10::Device device, const std::string& precision) {
  constexpr int kProducts = 6;  // the first of which prepares
  const int64_t edge = device.is_cpu() ? 512 : 8192;
  const auto dtype = precision == "bf16"   ? at::kBFloat16
                     : precision == "fp16" ? at::kHalf
                                           : at::kFloat;
  // Numbers of no generator: what is drawn afterwards stays the same.
  const auto numbers = at::arange(edge * edge, at::TensorOptions(device).dtype(at::kFloat));
  const auto matrix = (numbers.remainder(97) / 97 - 0.5).reshape({edge, edge}).to(dtype);
  barrier();
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kProducts; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const auto product = at::mm(matrix, matrix);
    if (!device.is_cpu()) product[0][0].item();  // waits for it
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::min(best, seconds.count());
  }
  const double own = 2 * std::pow(static_cast<double>(edge), 3) / best;
  return all_reduce(at::full({}, own, at::TensorOptions(device).dtype(at::kDouble))).item<double>();
}

std::string sharing_of(const std::vector<UsedDevice>& devices) {
  const auto shared =
      std::ranges::find_if(devices, [](const auto& device) { return device.ranks > 1; });
  if (shared == devices.end()) return "";
  const bool is_one_host = std::ranges::all_of(
      devices, [&](const auto& device) { return device.host == devices.front().host; });
  return std::to_string(shared->ranks) + " ranks share GPU " + std::to_string(shared->index) +
         (is_one_host ? "" : " of " + shared->host) +
         (shared->name.empty() ? "" : " (" + shared->name + ")") + ": for tests, not for speed";
}

}  // namespace tessera::train
