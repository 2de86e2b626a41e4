#pragma once

#include "support/rank_options.h"

#include <gtest/gtest.h>

#include <iosfwd>
#include <string>
#include <vector>

/// Tests that run on the CPU and on GPUs, with every backend.
namespace tessera::testing {

/// GPUs that this process sees. Makes no CUDA context.
int gpu_count();

/// Where a parametrised test runs.
struct DeviceCase {
  c10::DeviceType device = c10::DeviceType::CPU;
  std::string backend = "shm";
  int ranks = 2;

  std::string name() const;  // "cuda_nccl_2"
};
void PrintTo(const DeviceCase& device_case, std::ostream* out);  // NOLINT: gtest's name

/// Every backend with every number of ranks. A test is written once, as TEST_P whose body makes its
/// tensors on run_device():
///   TEST_P(Reducer, SumsGradients) { run_on(GetParam(), [] { … }); }
///   INSTANTIATE_TEST_SUITE_P(OnCuda, Reducer, ::testing::ValuesIn(cuda_cases()), case_name);
/// "OnCuda" in the name gives it the label cuda.
std::vector<DeviceCase> device_cases(c10::DeviceType device,
                                     const std::vector<std::string>& backends,
                                     const std::vector<int>& ranks = {2, 4});
std::vector<DeviceCase> cuda_cases(const std::vector<std::string>& backends = {"nccl", "shm"},
                                   const std::vector<int>& ranks = {2, 4});
/// Names the instances of TEST_P.
inline std::string case_name(const ::testing::TestParamInfo<DeviceCase>& info) {
  return info.param.name();
}

/// run_processes on the device, with the backend and as many ranks as the case says. Skips the test
/// with "no GPU: …" where there is none, and where the build lacks the backend.
void run_on(const DeviceCase& device_case, const RankBody& body, RankOptions options = {});

}  // namespace tessera::testing
