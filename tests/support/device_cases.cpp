#include "support/device_cases.h"

#include "shared_gpu.h"
#include "support/rank_run.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>

namespace tessera::testing {

int gpu_count() {
  static const int count = c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)
                               ? c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount()
                               : 0;
  return count;
}

c10::Device run_device() {
  const RankRun& run = current_run();
  if (run.device == c10::DeviceType::CPU) return {c10::DeviceType::CPU};
  TORCH_CHECK(gpu_count() > 0,
              "run_device: expected a GPU for ranks with RankOptions::device = CUDA, found none; "
              "ask gpu_count() first, or use run_on()");
  return {run.device, static_cast<c10::DeviceIndex>(run_rank() % gpu_count())};
}

void use_run_device() {
  const c10::Device device = run_device();
  if (device.is_cpu()) return;
  at::globalContext().lazyInitDevice(device.type());
  c10::impl::getDeviceGuardImpl(device.type())->setDevice(device);
}

std::map<std::string, std::string> shared_gpu_environment(int rank, int n,
                                                          const RankOptions& options) {
  if (options.device != c10::DeviceType::CUDA || n <= gpu_count()) return {};
  auto result = tool::shared_gpu_environment(rank);
  // Groups are made anew in every test: fewer connections to make.
  result["NCCL_MAX_NCHANNELS"] = "2";
  return result;
}

std::string DeviceCase::name() const {
  return c10::DeviceTypeName(device, /*lower_case=*/true) + "_" + backend + "_" +
         std::to_string(ranks);
}

void PrintTo(const DeviceCase& device_case, std::ostream* out) { *out << device_case.name(); }

std::vector<DeviceCase> device_cases(c10::DeviceType device,
                                     const std::vector<std::string>& backends,
                                     const std::vector<int>& ranks) {
  std::vector<DeviceCase> result;
  // By numbers of ranks first: then runs that follow each other can have the same processes.
  for (const int n : ranks) {
    for (const std::string& backend : backends)
      result.push_back({.device = device, .backend = backend, .ranks = n});
  }
  return result;
}

std::vector<DeviceCase> cuda_cases(const std::vector<std::string>& backends,
                                   const std::vector<int>& ranks) {
  return device_cases(c10::DeviceType::CUDA, backends, ranks);
}

void run_on(const DeviceCase& device_case, const RankBody& body, RankOptions options) {
  if (device_case.device == c10::DeviceType::CUDA && gpu_count() == 0)
    GTEST_SKIP() << "no GPU: " << device_case.name() << " needs one";
  const auto backends = available_backends();
  if (std::ranges::count(backends, device_case.backend) == 0)
    GTEST_SKIP() << "no backend " << device_case.backend << " in this build of libtorch";
  options.device = device_case.device;
  options.backend = device_case.backend;
  run_processes(device_case.ranks, body, std::move(options));
}

}  // namespace tessera::testing
