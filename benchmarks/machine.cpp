#include "machine.h"

#include <sys/utsname.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstdlib>
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

/// Whether NVIDIA's Multi-Process Service lets processes compute on a GPU side by side; without it
/// they take turns.
bool runs_mps() {
  const char* folder = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  std::ifstream file(std::filesystem::path(folder == nullptr ? "/tmp/nvidia-mps" : folder) /
                     "nvidia-cuda-mps-control.pid");
  std::string process;
  if (!(file >> process)) return false;
  std::ifstream comm("/proc/" + process + "/comm");
  std::string name;
  return std::getline(comm, name) && name.starts_with("nvidia-cuda-mps");
}

/// One line per GPU, as NVIDIA's driver tells, and one of how processes share them.
std::string gpus() {
  std::string lines;
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none))
    lines += "gpu: " + entry_of(gpu.path() / "information", "Model:") + "\n";
  if (!lines.empty()) lines += std::string("mps: ") + (runs_mps() ? "on" : "off") + "\n";
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
