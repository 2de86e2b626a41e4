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

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

}  // namespace

std::string describe_machine() {
  utsname kernel{};
  uname(&kernel);
  const std::time_t now = std::time(nullptr);
  const auto bytes =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  std::ostringstream out;
  out << "date: " << std::put_time(std::gmtime(&now), "%Y-%m-%d") << "\nprocessor: " << processor()
      << "\ncores: " << std::thread::hardware_concurrency() << "\nmemory: " << std::fixed
      << std::setprecision(0) << bytes / (1 << 30) << " GiB\nkernel: " << kernel.sysname << ' '
      << kernel.release << "\ncompiler: g++ " << __VERSION__ << "\nlibtorch: " << TORCH_VERSION
      << "\n";
  return out.str();
}

void write_machine_beside(const std::filesystem::path& table) {
  auto path = table;
  std::ofstream(path.replace_extension(".machine.txt")) << describe_machine();
}

}  // namespace tessera::benchmarks
