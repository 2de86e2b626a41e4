#include "compiler/runtime/roofline.h"

#include "base/text.h"
#include "compiler/kernels/buffers.h"
#include "compiler/record/dispatch_key.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

namespace tessera::compiler {
namespace {

constexpr int kRuns = 5;

/// A point in the work of a device: of a GPU, in its current stream.
class Moment {
 public:
  explicit Moment(c10::Device device) {
    if (!device.is_cpu()) {
      const c10::impl::VirtualGuardImpl devices(device.type());
      event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // one that tells the time
      event_->record(devices.getStream(device));
    }
    time_ = std::chrono::steady_clock::now();
  }

  /// Waits for it.
  double seconds_since(const Moment& earlier) {
    if (!event_) return std::chrono::duration<double>(time_ - earlier.time_).count();
    event_->synchronize();
    constexpr double kMilliseconds = 1e3;
    return earlier.event_->elapsedTime(*event_) / kMilliseconds;
  }

 private:
  mutable std::optional<c10::Event> event_;
  std::chrono::steady_clock::time_point time_;
};

/// More than caches hold.
at::Tensor large_tensor(c10::Device device) {
  constexpr int64_t kOfHost = int64_t{128} << 20, kOfGpu = int64_t{256} << 20;
  return at::zeros({device.is_cpu() ? kOfHost : kOfGpu},
                   at::TensorOptions(device).dtype(at::kByte));
}

/// The fastest of a few runs. `before` is not part of it. A GPU is still busy with that when the
/// rest is queued: what the host takes to launch does not count.
double fastest(c10::Device device, const std::function<void()>& before,
               const std::function<void()>& run) {
  double best = std::numeric_limits<double>::infinity();
  run();
  for (int i = 0; i < kRuns; ++i) {
    before();
    const Moment begun(device);
    run();
    best = std::min(best, Moment(device).seconds_since(begun));
  }
  return std::max(best, 1e-9);
}

double peak_bytes_of(c10::Device device) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, double>();
  const std::lock_guard lock(mutex);
  auto& peak = known[device.str()];
  if (peak == 0) {
    const auto from = large_tensor(device);
    auto to = large_tensor(device);
    const double seconds = fastest(device, [&] { from.fill_(1); }, [&] { to.copy_(from); });
    peak = 2.0 * static_cast<double>(from.numel()) / seconds;
  }
  return peak;
}

/// Zeros: any kernel takes them, as numbers, as classes and as masks.
at::Tensor make_tensor(const ValueType& type) {
  return at::empty_strided(type.sizes, type.strides,
                           at::TensorOptions(type.device).dtype(type.dtype))
      .zero_();
}

double seconds_of(const Graph& graph, const Node& node, const Launch& launch,
                  const at::Tensor& large) {
  std::vector<at::Tensor> tensors;
  const auto used = node.used();
  for (const size_t input : kernel_inputs(*node.body))
    tensors.push_back(make_tensor(graph.type(used.at(input))));
  for (const ValueId value : node.defined()) tensors.push_back(make_tensor(graph.type(value)));
  std::vector<void*> addresses;
  for (const auto& tensor : tensors)
    addresses.push_back(tensor.unsafeGetTensorImpl()->mutable_data());
  return fastest(large.device(), [&] { large.fill_(1); }, [&] { launch(addresses.data()); });
}

std::string rate_text(double bytes_per_second) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g GB/s", bytes_per_second / 1e9);
  return text;
}

std::string time_text(double seconds) {
  char text[32];
  if (seconds < 1e-3)
    std::snprintf(text, sizeof(text), "%.3g us", seconds * 1e6);
  else
    std::snprintf(text, sizeof(text), "%.3g ms", seconds * 1e3);
  return text;
}

}  // namespace

std::vector<KernelTime> time_kernels(const Graph& graph, const std::vector<Launch>& kernels) {
  const at::NoGradGuard no_grad;
  const RunScope below_autograd;
  const auto uses = write_kernels(graph).uses;
  std::vector<KernelTime> times;
  std::map<std::string, at::Tensor> large;  // by device
  for (size_t i = 0; i < graph.nodes.size() && i < kernels.size(); ++i) {
    if (!uses[i] || !kernels[i]) continue;
    const auto known = std::ranges::find(times, uses[i]->name, &KernelTime::name);
    if (known != times.end()) {
      ++known->calls;
      continue;
    }
    const Node& node = graph.nodes[i];
    const auto device = graph.type(node.defined().at(0)).device;
    const c10::DeviceGuard guard(device);
    const double peak = peak_bytes_of(device);
    auto& other = large[device.str()];
    if (!other.defined()) other = large_tensor(device);
    times.push_back({.name = uses[i]->name,
                     .device = device,
                     .calls = 1,
                     .bytes = bytes_moved(graph, node),
                     .seconds = seconds_of(graph, node, kernels[i], other),
                     .peak_bytes = peak});
  }
  std::ranges::stable_sort(times, std::greater(), [](const KernelTime& time) {
    return time.seconds * static_cast<double>(time.calls);
  });
  return times;
}

std::string roofline_text(const std::vector<KernelTime>& times) {
  std::string text;
  double all = 0;
  size_t calls = 0;
  for (const auto& time : times) {
    char share[32];
    std::snprintf(share, sizeof(share), "%.0f %%", 100 * time.share());
    text += "kernel " + time.name + ": " + format_bytes(static_cast<size_t>(time.bytes)) + " in " +
            time_text(time.seconds) + ", " +
            rate_text(static_cast<double>(time.bytes) / time.seconds) + ", " + share + " of " +
            rate_text(time.peak_bytes) + "; called " + std::to_string(time.calls) +
            (time.calls == 1 ? " time\n" : " times\n");
    all += time.seconds * static_cast<double>(time.calls);
    calls += time.calls;
  }
  if (!times.empty())
    text += "all kernels: " + time_text(all) + " for " + std::to_string(calls) +
            (calls == 1 ? " call\n" : " calls\n");
  return text;
}

}  // namespace tessera::compiler
