#include "machine.h"

#include <sys/utsname.h>
#include <torch/version.h>
#include <unistd.h>

#include <ctime>
#include <fstream>
#include <iomanip>
#include <sstream>
#include <thread>

namespace tessera::benchmarks {
namespace {

/// What follows the colon in the first line of the file that starts so.
std::string entry_of(const std::filesystem::path& path, const std::string& start) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(start))
      return line.substr(line.find_first_not_of(" \t", line.find(':') + 1));
  }
  return "unknown";
}

/// One line per GPU, as NVIDIA's driver tells.
std::string gpus() {
  std::string lines;
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none))
    lines += "gpu: " + entry_of(gpu.path() / "information", "Model:") + "\n";
  return lines;
}

}  // namespace

std::string describe_machine() {
  utsname kernel{};
  uname(&kernel);
  const std::time_t now = std::time(nullptr);
  const auto bytes =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  std::ostringstream out;
  out << "date: " << std::put_time(std::gmtime(&now), "%Y-%m-%d")
      << "\nprocessor: " << entry_of("/proc/cpuinfo", "model name")
      << "\ncores: " << std::thread::hardware_concurrency() << "\nmemory: " << std::fixed
      << std::setprecision(0) << bytes / (1 << 30) << " GiB\nkernel: " << kernel.sysname << ' '
      << kernel.release << "\ncompiler: g++ " << __VERSION__ << "\nlibtorch: " << TORCH_VERSION
      << "\n"
      << gpus();
  return out.str();
}

void write_machine_beside(const std::filesystem::path& table) {
  auto path = table;
  std::ofstream(path.replace_extension(".machine.txt")) << describe_machine();
}

}  // namespace tessera::benchmarks
