// How fast do ranks train together? Against PyTorch, and against not talking at all.
#include <tessera/comm.h>

#include "rank0.h"
#include "table.h"
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
#include <cstdlib>
#include <iostream>
#include <utility>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;

constexpr int kCheckedSteps = 3;

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

void compare(const Arrangement& arrangement, const TrainOptions& options, TrainTable& table) {
  const auto& [job_name, mode, device] = arrangement;
  const int steps = options.steps > 0 ? options.steps : steps_per_block(job_name, device.type());
  auto job = make_job(job_name, batch_rank(mode), device);
  parallelise(job, mode);
  const auto ours = make_local_side(std::move(job), is_compiled(mode));
  const auto limit = make_local_side(make_job(job_name, batch_rank(mode), device));
  const auto expected = ours->train(kCheckedSteps);
  for (const auto& name : options.peers) {
    if (!goes_with(name, mode)) {
      if (rank() == 0) std::cerr << name << " has no mode " << mode << ": left out" << std::endl;
      continue;
    }
    const auto peer = make_peer(name, arrangement);
    require_agreement(expected, peer->train(kCheckedSteps), device.type(),
                      "peer " + name + " (job " + job_name + ", mode " + mode + ")");
    Comparison row{.job = job_name, .mode = mode, .peer = name};
    time_in_turn({{ours.get(), &row.tessera_seconds},
                  {peer.get(), &row.peer_seconds},
                  {limit.get(), &row.limit_seconds}},
                 options.pairs, steps);
    table.add(row);
  }
}

void run(const TrainOptions& options, c10::Device device) {
  TrainTable table(options.csv);
  for (const auto& job : options.jobs) {
    for (const auto& mode : options.modes) compare({job, mode, device}, options, table);
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
  TORCH_CHECK_VALUE(devices > 0, "bench train: expected a GPU for --device cuda, found none");
  return {type, static_cast<c10::DeviceIndex>(local_rank() % devices)};
}

/// Ranks that share a GPU tell NCCL that they are different hosts, which is how it takes several of
/// them; peers/train.py does the same. For trying things out, not to train faster.
void let_ranks_share_gpus() {
  const char* rank = std::getenv("TESSERA_RANK");
  const char* ranks_here = std::getenv("TESSERA_LOCAL_WORLD_SIZE");
  if (rank == nullptr || ranks_here == nullptr) return;
  if (std::cmp_less_equal(std::atoi(ranks_here), torch::cuda::device_count())) return;
  setenv("NCCL_HOSTID", (std::string("rank") + rank).c_str(), /*overwrite=*/0);
  setenv("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/0);
  setenv("NCCL_IB_DISABLE", "1", /*overwrite=*/0);
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
  add_train_options(app, options);
  if (const auto code = parse_words(app, argc, argv)) return *code;
  if (options.list) {
    if (!is_other_rank()) std::cout << list_choices(options.device_type());
    return 0;
  }
  const bool on_cuda = options.device_type() == c10::DeviceType::CUDA;
  if (on_cuda) {
    let_ranks_share_gpus();
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
