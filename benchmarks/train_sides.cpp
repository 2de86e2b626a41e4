#include "train_sides.h"

#include <tessera/autocast.h>
#include <tessera/comm.h>
#include <tessera/compile.h>
#include <tessera/dtensor.h>
#include <tessera/optim.h>

#include "rank0.h"
#include "train/kernels.h"

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <nlohmann/json.hpp>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <optional>

namespace tessera::benchmarks {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr int64_t kSamples = 64;
constexpr int kWarmups = 8;  // before kernels are recorded
/// Before memory is measured: by then a program has been captured. As in peers/train.py, steps are
/// few, so that none of them is recorded again; among the later ones one is.
constexpr int kMemoryWarmups = 4, kMemorySteps = 2, kMemoryLaterSteps = 8;
struct Tolerance {
  double relative;
  double absolute;
  double together = 0;  // the share of weights that may be off in the same direction
};
/// Three steps of AdamW move a weight by up to 3e-3, in a direction that rounding may decide where
/// its gradient is close to zero.
constexpr Tolerance kOwnKernels = {2e-3, 6e-3};
constexpr Tolerance kSameKernels = {1.3e-6, 1e-5};
/// The gradients of a row, which has one scale, are off together: those of tokens that a batch does
/// not have are all tiny, and AdamW moves a weight by its gradient's sign.
constexpr Tolerance kEightBits = {1e-2, 6e-3, 5e-3};

/// As fingerprint() in peers/train.py.
std::vector<double> fingerprint(const at::Tensor& parameter) {
  const auto whole = is_dtensor(parameter) ? DTensor::of(parameter).full_tensor() : parameter;
  const auto flat = whole.detach().reshape(-1).to(at::kCPU, at::kDouble);
  const auto sampled =
      flat.slice(0, 0, std::nullopt, std::max<int64_t>(flat.numel() / kSamples, 1)).contiguous();
  std::vector<double> result = {static_cast<double>(flat.numel()), flat.sum().item<double>(),
                                flat.norm().item<double>()};
  result.insert(result.end(), sampled.const_data_ptr<double>(),
                sampled.const_data_ptr<double>() + sampled.numel());
  return result;
}

RankReport report_of(const std::string& text) {
  const auto answer = json::parse(text);
  return {.losses = answer.at("losses"), .parameters = answer.at("parameters")};
}

double slowest(const std::vector<std::string>& answers) {
  double seconds = 0;
  for (const auto& answer : answers)
    seconds = std::max(seconds, json::parse(answer).at("seconds").get<double>());
  return seconds;
}

DeviceMemory most(const std::vector<std::string>& answers) {
  DeviceMemory memory = {};
  for (const auto& text : answers) {
    const auto answer = json::parse(text);
    memory.steady = std::max(memory.steady, answer.at("steady").get<int64_t>());
    memory.peak = std::max(memory.peak, answer.at("peak").get<int64_t>());
  }
  return memory;
}

class LocalSide final : public Side {
 public:
  LocalSide(Job job, bool compiles)
      : job_(std::move(job)),
        optimizer_(job_.model->parameters(), {.lr = 1e-3, .fused = true}),
        step_([this] { return eager_step(); }) {
    if (job_.device.is_cuda()) forget_peak();
    if (compiles)
      step_ = compile(step_, {.module = *job_.model, .optimizer = optimizer_, .fullgraph = true});
  }

  Report train(int steps) override {
    RankReport mine;
    for (int i = 0; i < steps; ++i) mine.losses.push_back(step_().item<double>());
    for (const auto& parameter : job_.model->parameters())
      mine.parameters.push_back(fingerprint(parameter));
    const json text = {{"losses", mine.losses}, {"parameters", mine.parameters}};
    Report report;
    for (const auto& answer : gather_bytes(text.dump())) report.push_back(report_of(answer));
    return report;
  }

  double time_block(int steps) override {
    for (int i = 0; i <= steps / 10; ++i) step_();
    barrier();
    wait_for_device();
    const auto start = Clock::now();
    for (int i = 0; i < steps; ++i) step_();
    wait_for_device();
    const std::chrono::duration<double> elapsed = Clock::now() - start;
    return slowest(gather_bytes(json{{"seconds", elapsed.count()}}.dump())) / steps;
  }

  std::optional<DeviceMemory> memory() override {
    if (!job_.device.is_cuda()) return std::nullopt;
    const int64_t before = peak_after(kMemoryWarmups);
    forget_peak();
    const int64_t steady = peak_after(kMemorySteps);
    const int64_t peak = std::max(before, peak_after(kMemoryLaterSteps));
    return most(gather_bytes(json{{"steady", steady}, {"peak", peak}}.dump()));
  }

  std::vector<Kernel> kernels() override {
    for (int i = 0; i < kWarmups; ++i) step_();
    wait_for_device();
    train::KernelRecorder recorder;
    step_();
    wait_for_device();
    std::vector<Kernel> kernels;
    const auto records = recorder.take();
    const auto first = std::ranges::min_element(records, {}, &train::KernelRecord::begin);
    for (const auto& record : records)
      kernels.push_back({record.name, static_cast<double>(record.end - record.begin) / 1e3,
                         static_cast<double>(record.begin - first->begin) / 1e3});
    if (kernels.empty()) stop_all(std::string("bench train: ") + train::kNoKernels);
    return kernels;
  }

 private:
  at::DeviceAllocator& allocator() const { return *at::getDeviceAllocator(job_.device.type()); }

  void forget_peak() const {
    allocator().emptyCache();
    allocator().resetPeakStats(job_.device.index());
  }

  /// Bytes, of this rank. Memory of CUDA graphs counts as reserved alone.
  int64_t peak_after(int steps) const {
    for (int i = 0; i < steps; ++i) step_();
    wait_for_device();
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return allocator().getDeviceStats(job_.device.index()).reserved_bytes[kAll].peak;
  }

  void wait_for_device() const {
    if (job_.device.is_cuda()) torch::cuda::synchronize();
  }

  at::Tensor loss_of_forward() {
    std::optional<Autocast> autocast;
    if (job_.device.is_cuda()) autocast.emplace(at::kCUDA, AutocastOptions{.dtype = at::kBFloat16});
    return job_.loss(job_.forward());
  }

  at::Tensor eager_step() {
    optimizer_.zero_grad();
    auto loss = loss_of_forward();
    loss.backward();
    optimizer_.step();
    return loss;
  }

  Job job_;
  optim::AdamW optimizer_;
  std::function<at::Tensor()> step_;
};

class PythonSide final : public Side {
 public:
  PythonSide(PeerJobs& processes, const PeerGroup& group, const PeerJob::Task& task)
      : has_gpu_(group.device == "cuda") {
    on_rank0([&] {
      job_ = &processes.of(group);
      job_->begin(task);
      return std::string();
    });
  }

  Report train(int steps) override {
    Report report;
    for (const auto& answer : ask("train", steps)) report.push_back(report_of(answer));
    return report;
  }

  double time_block(int steps) override { return slowest(ask("time", steps)) / steps; }

  std::optional<DeviceMemory> memory() override {
    if (!has_gpu_) return std::nullopt;
    return most(ask("memory", kMemoryWarmups));
  }

  std::vector<Kernel> kernels() override {
    std::vector<Kernel> kernels;
    using Row = std::tuple<std::string, double, double>;
    for (const auto& [name, microseconds, begin] :
         json::parse(ask("kernels", kWarmups)[0]).at("kernels").get<std::vector<Row>>())
      kernels.push_back({name, microseconds, begin});
    return kernels;
  }

 private:
  std::vector<std::string> ask(const std::string& what, int steps) {
    return json::parse(
        on_rank0([&] { return json(job_->ask(what + " " + std::to_string(steps))).dump(); }));
  }

  bool has_gpu_;
  PeerJob* job_ = nullptr;  // on rank 0
};

void require_close(double expected, double actual, double tolerance, const std::string& who,
                   const std::string& what) {
  if (std::abs(expected - actual) <= tolerance) return;  // false for NaN
  stop_all(c10::str("bench train: expected ", who, " to train as Tessera does, but ", what, " is ",
                    actual, " instead of ", expected, " (tolerance ", tolerance,
                    "); nothing was measured: one of the two is wrong"));
}

void compare_parameter(const std::vector<double>& expected, const std::vector<double>& actual,
                       Tolerance tolerance, const std::string& who, const std::string& which) {
  const double numel = expected[0];
  require_close(static_cast<double>(expected.size()), static_cast<double>(actual.size()), 0, who,
                "the number of samples of " + which);
  require_close(numel, actual[0], 0, who, "the size of " + which);
  // Rounding errors are independent of each other: those of a sum grow with the root of its length.
  const double spread = tolerance.absolute * std::sqrt(numel) + tolerance.relative * expected[2];
  // Those that are off together move the sum by their number, the norm by no more than its root.
  const double together = tolerance.together * numel;
  require_close(expected[1], actual[1], spread + tolerance.absolute * together, who,
                "the sum of " + which);
  require_close(expected[2], actual[2], spread + tolerance.absolute * std::sqrt(together), who,
                "the norm of " + which);
  for (size_t i = 3; i < expected.size(); ++i) {
    require_close(expected[i], actual[i],
                  tolerance.absolute + tolerance.relative * std::abs(expected[i]), who,
                  "sample " + std::to_string(i - 3) + " of " + which);
  }
}

}  // namespace

std::unique_ptr<Side> make_local_side(Job job, bool compiles) {
  return std::make_unique<LocalSide>(std::move(job), compiles);
}

std::unique_ptr<Side> make_python_side(PeerJobs& processes, const PeerGroup& group,
                                       const PeerJob::Task& task) {
  return std::make_unique<PythonSide>(processes, group, task);
}

void require_agreement(const Report& expected, const Report& actual, Rounding rounding,
                       const std::string& who) {
  const bool is_low = rounding == Rounding::EightBits;
  const auto& of_losses = is_low                        ? kEightBits
                          : rounding == Rounding::Other ? kOwnKernels
                                                        : kSameKernels;
  const auto& of_parameters = is_low                       ? kEightBits
                              : rounding == Rounding::Same ? kSameKernels
                                                           : kOwnKernels;
  TORCH_INTERNAL_ASSERT(expected.size() == actual.size());
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    const auto on_rank = " on rank " + std::to_string(rank);
    const auto& [losses, parameters] = expected[rank];
    require_close(static_cast<double>(parameters.size()),
                  static_cast<double>(actual[rank].parameters.size()), 0, who,
                  "the number of parameters" + on_rank);
    for (size_t step = 0; step < losses.size(); ++step) {
      require_close(losses[step], actual[rank].losses.at(step),
                    of_losses.absolute + of_losses.relative * std::abs(losses[step]), who,
                    "the loss of step " + std::to_string(step) + on_rank);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      compare_parameter(parameters[i], actual[rank].parameters[i], of_parameters, who,
                        "parameter " + std::to_string(i) + on_rank);
    }
  }
}

}  // namespace tessera::benchmarks
