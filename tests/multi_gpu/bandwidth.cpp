#include <tessera/comm.h>

#include "checks.h"

#include <torch/cuda.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iomanip>
#include <sstream>

namespace multi_gpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kShareOfPeak = 0.5;  // at the largest size

struct Collective {
  const char* name;
  /// Bytes that pass each link, by bytes of the larger side, for this many ranks: what one calls
  /// bus bandwidth.
  double (*bus_factor)(double ranks);
  std::function<void(c10d::Backend& backend, at::Tensor& large, at::Tensor& small)> run;
};

double all_reduce_factor(double ranks) { return 2 * (ranks - 1) / ranks; }
double one_way_factor(double ranks) { return (ranks - 1) / ranks; }

const std::vector<Collective>& collectives() {
  static const std::vector<Collective> all = {
      {"all_reduce", all_reduce_factor,
       [](c10d::Backend& backend, at::Tensor& large, at::Tensor&) {
         std::vector<at::Tensor> tensors = {large};
         backend.allreduce(tensors)->wait();
       }},
      {"all_gather", one_way_factor,
       [](c10d::Backend& backend, at::Tensor& large, at::Tensor& small) {
         backend._allgather_base(large, small)->wait();
       }},
      {"reduce_scatter", one_way_factor,
       [](c10d::Backend& backend, at::Tensor& large, at::Tensor& small) {
         backend._reduce_scatter_base(small, large)->wait();
       }},
  };
  return all;
}

/// Seconds of one, the median of batches in which several are on their way.
double seconds_of(const std::function<void()>& run, c10::Device device, int count) {
  for (int i = 0; i < 2; ++i) run();
  std::vector<double> seconds;
  for (int batch = 0; batch < 3; ++batch) {
    synchronize(device);
    tessera::barrier();
    const auto start = Clock::now();
    for (int i = 0; i < count; ++i) run();
    synchronize(device);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count() / count);
  }
  return median(std::move(seconds));
}

}  // namespace

void synchronize(c10::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Outcome check_bandwidth(const Setting& setting) {
  const bool is_short = setting.shares_device || setting.device.is_cpu();
  const auto sizes = is_short ? std::vector<int64_t>{64 << 10, 4 << 20}
                              : std::vector<int64_t>{64 << 10, 1 << 20, 16 << 20, 256 << 20};
  const int64_t ranks = tessera::world_size();
  const auto backend = tessera::default_group()->getBackend(setting.device.type());
  const auto options = at::TensorOptions(at::kFloat).device(setting.device);
  double slowest = 0;  // bus bandwidth at the largest size
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << "GB/s, algorithm (bus):";
  for (const auto& collective : collectives()) {
    for (const auto bytes : sizes) {
      const auto part = bytes / static_cast<int64_t>(sizeof(float)) / ranks;
      auto large = at::zeros({part * ranks}, options);
      auto small = at::zeros({part}, options);
      const auto run = [&] { collective.run(*backend, large, small); };
      const double gbps = static_cast<double>(large.nbytes()) /
                          seconds_of(run, setting.device, is_short ? 3 : 10) / 1e9;
      const double bus = gbps * collective.bus_factor(static_cast<double>(ranks));
      text << "\n       " << collective.name << " of " << (bytes >> 10) << " KiB: " << gbps << " ("
           << bus << ")";
      if (bytes == sizes.back()) slowest = slowest == 0 ? bus : std::min(slowest, bus);
    }
  }
  if (setting.shares_device) {
    text << "\n       ranks share a device: this says nothing of links";
    return {true, text.str()};
  }
  if (setting.peak_gbps <= 0) {
    text << "\n       the links' peak is not known: not judged";
    return {true, text.str()};
  }
  text << "\n       the slowest of the largest size reaches " << 100 * slowest / setting.peak_gbps
       << " % of the links' " << setting.peak_gbps << " GB/s, expected at least "
       << 100 * kShareOfPeak << " %";
  return {slowest >= kShareOfPeak * setting.peak_gbps, text.str()};
}

}  // namespace multi_gpu
