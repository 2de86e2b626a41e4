// One check of scripts/test_multi_gpu.sh, on all ranks:
//   tessera run -n 2 -- multi_gpu_check replicate
// A line that begins with PASS or FAIL says what came of it.
#include <tessera/comm.h>

#include "checks.h"
#include "shared_gpu.h"

#include <CLI/CLI.hpp>
#include <c10/core/DeviceGuard.h>
#include <torch/cuda.h>
#include <torch/version.h>

#include <chrono>
#include <iostream>

namespace {

using multi_gpu::Outcome;
using multi_gpu::Setting;

struct Check {
  const char* name;
  Outcome (*run)(const Setting&);
};
constexpr Check kChecks[] = {
    {"replicate", multi_gpu::check_replicate},
    {"fully_shard", multi_gpu::check_fully_shard},
    {"tensor_parallel", multi_gpu::check_tensor_parallel},
    {"redistribute", multi_gpu::check_redistribute},
    {"checkpoint", multi_gpu::check_checkpoint},
    {"bandwidth", multi_gpu::check_bandwidth},
    {"overlap", multi_gpu::check_overlap},
};

struct Words {
  std::string check;
  std::string device = "cuda";
  std::string folder = "multi_gpu_checkpoint";
  double peak_gbps = 0;
  int timeout_seconds = 60;
  bool list = false;
  bool count = false;
};

/// Whether all ranks are content. Rank 0 tells, with the words of the first that is not.
bool tell(const std::string& name, const Outcome& own) {
  const auto all = tessera::gather_bytes((own.passed ? '+' : '-') + own.text);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() == '+') continue;
    if (tessera::rank() == 0)
      std::cout << "FAIL " << name << ", rank " << rank << ": " << all[rank].substr(1) << std::endl;
    return false;
  }
  if (tessera::rank() == 0) std::cout << "PASS " << name << ": " << own.text << std::endl;
  return true;
}

bool run(const Words& words) {
  const bool is_cuda = words.device == "cuda";
  const auto devices = is_cuda ? static_cast<int64_t>(torch::cuda::device_count()) : 1;
  TORCH_CHECK_VALUE(devices > 0,
                    "multi_gpu_check: expected a GPU, but libtorch finds none; use --device cpu, "
                    "or a CUDA build of libtorch where a GPU is visible");
  const bool shares = is_cuda && tessera::tool::let_ranks_share_gpus(devices);
  tessera::init({.backend = is_cuda ? "cpu:shm,cuda:nccl" : "auto",
                 .timeout = std::chrono::seconds(words.timeout_seconds)});
  const auto device =
      is_cuda
          ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(tessera::local_rank() % devices))
          : c10::Device(c10::kCPU);
  bool passed = false;
  {
    const c10::OptionalDeviceGuard guard(device);
    const Setting setting{device, shares, words.folder, words.peak_gbps};
    for (const auto& check : kChecks) {
      if (words.check == check.name) passed = tell(check.name, check.run(setting));
    }
  }
  tessera::shutdown();
  return passed;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("One check of make test-multi-gpu", "multi_gpu_check");
  Words words;
  std::vector<std::string> names;
  for (const auto& check : kChecks) names.emplace_back(check.name);
  app.add_option("check", words.check, "which")->check(CLI::IsMember(names));
  app.add_option("--device", words.device, "where")->check(CLI::IsMember({"cuda", "cpu"}));
  app.add_option("--folder", words.folder, "for the saved checkpoint");
  app.add_option("--peak", words.peak_gbps, "GB/s of the links in one direction; 0: unknown");
  app.add_option("--timeout", words.timeout_seconds, "seconds that a collective waits for ranks");
  app.add_flag("--list", words.list, "print the checks and stop");
  app.add_flag("--devices", words.count, "print libtorch's version and the number of GPUs, stop");
  CLI11_PARSE(app, argc, argv);
  if (words.list) {
    for (const auto& name : names) std::cout << name << "\n";
    return 0;
  }
  if (words.count) {
    std::cout << TORCH_VERSION << " " << int{torch::cuda::device_count()} << std::endl;
    return 0;
  }
  return run(words) ? 0 : 1;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
