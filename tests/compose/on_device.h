#pragma once

#include "support/device_cases.h"
#include "support/ranks.h"
#include "support/trainee.h"
#include "support/twins.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

/// What tests need that run on the CPU and on GPUs: models and inputs on the run's device, and
/// streams without a CUDA header. Numbers are drawn on the CPU, so both devices get the same.
namespace tessera::testing {

/// Tests that run on devices and with backends, on as many ranks as each says. Instances are made
/// for one number of ranks, and named by backend_name.
class OnBackends : public ::testing::TestWithParam<DeviceCase> {
 protected:
  void run(int ranks, const RankBody& body, RankOptions options = {}) {
    auto where = GetParam();
    where.ranks = ranks;
    run_on(where, body, std::move(options));
  }
};
inline std::string backend_name(const ::testing::TestParamInfo<DeviceCase>& info) {
  return info.param.backend;
}
inline std::vector<DeviceCase> cpu_backends() {
  return device_cases(at::kCPU, {"shm", "gloo"}, {2});
}
inline std::vector<DeviceCase> cuda_backends() { return cuda_cases({"nccl", "shm"}, {2}); }

template <class M>
M on_device(M module) {
  module->to(run_device());
  return module;
}

template <class M, class... Args>
auto device_twins(uint64_t seed, const Args&... args) {
  auto pair = twins<M>(seed, args...);
  on_device(pair.first);
  on_device(pair.second);
  return pair;
}

/// The same numbers for a seed on every device.
inline at::Tensor drawn_on_device(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed)).to(run_device());
}

/// Moves what the training comparisons draw to the run's device.
template <class M>
Trainee fed(M& module) {
  Trainee result = trainee(module);
  result.forward = [forward = std::move(result.forward)](const at::Tensor& x) {
    return forward(x.to(run_device()));
  };
  return result;
}

inline c10::Stream current_stream() {
  return c10::impl::VirtualGuardImpl(run_device().type()).getStream(run_device());
}
inline c10::Stream side_stream() {
  return c10::impl::VirtualGuardImpl(run_device().type()).getStreamFromGlobalPool(run_device());
}

/// `later` goes on when what `earlier` has been given so far is done. The host does not wait.
inline void order_streams(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

/// Kernels that keep the current stream of the run's device busy for a good tenth of a second.
class BusyStream {
 public:
  BusyStream() : done_(run_device().type()) {
    constexpr int64_t kWidth = 4096;
    const auto a = at::full({kWidth, kWidth}, 1e-4, at::TensorOptions(run_device()));
    auto b = at::empty_like(a);
    for (int i = 0; i < 60; ++i) at::mm_out(b, a, a);
    done_.record(current_stream());
  }
  bool is_running() const { return !done_.query(); }

 private:
  c10::Event done_;
};

/// Whether `call` returns to the host while kernels that were queued before it still run. It is
/// made once before, so that nothing is set up or allocated for the first time.
template <class F>
bool returns_ahead_of_device(F&& call) {
  call();
  {
    const BusyStream warm_up;
  }
  c10::impl::VirtualGuardImpl(run_device().type()).synchronizeDevice(run_device().index());
  const BusyStream busy;
  call();
  return busy.is_running();
}

}  // namespace tessera::testing
