// How fast do ranks train together? Against PyTorch, and against not talking at all.
#include <tessera/comm.h>

#include "rank0.h"
#include "shared_gpu.h"
#include "table.h"
#include "train_kernels.h"
#include "train_modes.h"
#include "train_options.h"
#include "train_peers.h"
#include "train_sides.h"
#include "train_table.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/SDPBackend.h>
#include <c10/core/DeviceGuard.h>
#include <torch/cuda.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;

constexpr int kCheckedSteps = 3;  // in 16 bits rounding grows from step to step

struct Timed {
  Side* side;
  std::vector<double>* seconds;
};

/// Blocks of the sides in turn, so that a busy moment of the machine hits all alike; who begins
/// changes from round to round. The first round only warms up.
void time_in_turn(std::vector<Timed> sides, int rounds, int steps) {
  for (int round = 0; round <= rounds; ++round) {
    for (const auto& [side, seconds] : sides) {
      const double result = side->time_block(steps);
      if (round > 0) seconds->push_back(result);
    }
    std::rotate(sides.begin(), sides.begin() + 1, sides.end());
  }
}

/// Seconds since it was made or last asked.
class Stopwatch {
 public:
  double lap() {
    const auto before = std::exchange(last_, Clock::now());
    return std::chrono::duration<double>(last_ - before).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

std::unique_ptr<Side> make_ours(Job job, const std::string& mode) {
  parallelise(job, mode);
  return make_local_side(std::move(job), is_compiled(mode));
}

/// The peers that have something like the mode; the others are named.
std::vector<std::string> peers_of(const TrainOptions& options, const std::string& mode) {
  std::vector<std::string> peers;
  for (const auto& name : options.peers) {
    if (goes_with(name, mode)) {
      peers.push_back(name);
    } else if (rank() == 0) {
      std::cerr << name << " has no mode " << mode << ": left out" << std::endl;
    }
  }
  return peers;
}

Rounding rounding_of(const Arrangement& arrangement, const std::string& peer) {
  if (is_fp8(arrangement.mode)) return Rounding::EightBits;
  if (!arrangement.device.is_cpu() || peer == "jax" || peer == "pytorch_compile")
    return Rounding::Other;
  // Our loss of a qwen makes gradients by blocks of rows.
  return arrangement.job == "qwen" ? Rounding::OtherGradients : Rounding::Same;
}

void compare(const Arrangement& arrangement, const TrainOptions& options, PeerJobs& processes,
             TrainTable& table) {
  const auto& [job_name, mode, device] = arrangement;
  const int steps = options.steps > 0 ? options.steps : steps_per_block(job_name, device.type());
  auto job = make_job(job_name, batch_rank(mode), device);
  const int64_t tokens = job.tokens * ranks_with_batches(mode);
  const auto ours = make_ours(std::move(job), mode);
  const auto expected = ours->train(kCheckedSteps);
  const auto memory = ours->memory();  // before there is another model in this process
  std::unique_ptr<Side> limit;         // none where it is what we do
  if (mode != "eager") limit = make_local_side(make_job(job_name, batch_rank(mode), device));
  for (const auto& name : peers_of(options, mode)) {
    Stopwatch watch;
    const auto peer = make_peer(name, arrangement, processes);
    const double started = watch.lap();
    const auto who = "peer " + name + " (job " + job_name + ", mode " + mode + ")";
    require_agreement(expected, peer->train(kCheckedSteps), rounding_of(arrangement, name), who);
    const double checked = watch.lap();
    Comparison row{.job = job_name,
                   .mode = mode,
                   .peer = name,
                   .tokens = tokens,
                   .tessera_memory = memory,
                   .peer_memory = peer->memory()};
    std::vector<Timed> sides = {{ours.get(), &row.tessera_seconds},
                                {peer.get(), &row.peer_seconds}};
    if (limit) sides.push_back({limit.get(), &row.limit_seconds});
    time_in_turn(std::move(sides), options.pairs, steps);
    if (!limit) row.limit_seconds = row.tessera_seconds;
    table.add(row);
    if (rank() != 0) continue;
    std::cerr << who << ": made in " << started << " s, checked in " << checked << " s, timed in "
              << watch.lap() << " s" << std::endl;
  }
}

void list_kernels(const Arrangement& arrangement, const TrainOptions& options,
                  PeerJobs& processes) {
  const auto& [job, mode, device] = arrangement;
  const auto ours = make_ours(make_job(job, batch_rank(mode), device), mode)->kernels();
  for (const auto& name : peers_of(options, mode)) {
    const auto theirs = make_peer(name, arrangement, processes)->kernels();
    const auto further = [](const std::string& word, const char* usual) {
      return word == usual ? "" : "-" + word;
    };
    if (rank() == 0)
      write_kernels(job + further(mode, "eager") + further(name, "pytorch"),
                    kernel_table(ours, theirs, name));
  }
}

void run(const TrainOptions& options, c10::Device device) {
  PeerJobs processes;
  std::optional<TrainTable> table;
  if (!options.kernels) table.emplace(options.csv);
  for (const auto& job : options.jobs) {
    for (const auto& mode : options.modes) {
      if (table) {
        compare({job, mode, device}, options, processes, *table);
      } else {
        list_kernels({job, mode, device}, options, processes);
      }
    }
  }
}

int fail(const std::string& message) {
  std::cerr << "tessera: " << message << std::endl;
  return 1;
}

/// The device that this rank trains on.
c10::Device device_of_rank(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return type;
  const auto devices = static_cast<int>(torch::cuda::device_count());
  return {type, static_cast<c10::DeviceIndex>(local_rank() % devices)};
}

/// On a GPU Tessera's side asks cuDNN's attention first, as `tessera train` does. PyTorch's peers
/// have their default.
void prefer_cudnn_attention() {
  constexpr auto kFirst = static_cast<int64_t>(at::SDPBackend::cudnn_attention);
  std::vector<int64_t> order = {kFirst};
  for (const auto backend : at::globalContext().sDPPriorityOrder()) {
    if (static_cast<int64_t>(backend) != kFirst) order.push_back(static_cast<int64_t>(backend));
  }
  at::globalContext().setSDPPriorityOrder(order);
}

int parse_and_run(int argc, char** argv) {
  CLI::App app(
      "Training steps of Tessera against PyTorch's, and against the same step without "
      "communication; results are compared before they are timed",
      "tessera bench train");
  TrainOptions options;
  show_ranks(app);
  add_train_options(app, options);
  if (const auto code = parse_words(app, argc, argv)) return *code;
  if (options.list) {
    if (!is_other_rank()) std::cout << list_choices();
    return 0;
  }
  const bool on_cuda = options.device_type() == c10::DeviceType::CUDA;
  if (on_cuda) {
    if (const auto code = refuse_without_gpu(app)) return *code;
    tool::let_ranks_share_gpus(  // peers/train.py does the same
        static_cast<int64_t>(torch::cuda::device_count()));
    prefer_cudnn_attention();
  }
  // NCCL for all, as its peers have it, even if ranks share a GPU.
  init({.backend = on_cuda ? "cpu:shm,cuda:nccl" : "auto"});
  const auto device = device_of_rank(options.device_type());
  const c10::OptionalDeviceGuard guard(device);
  run(options, device);
  shutdown();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    at::set_num_threads(1);
    return parse_and_run(argc, argv);
  } catch (const StoppedByRank0&) {
    return 0;
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}
