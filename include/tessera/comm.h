#pragma once

#include <tessera/comm/backend.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Ranks, groups and collectives. A group is a c10d::ProcessGroup, so everything that speaks c10d
/// takes ours and asynchronous collectives are its members: `group->allreduce(tensors)` returns a
/// c10d::Work.
namespace tessera {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using ReduceOp = c10d::ReduceOp;  // SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR

inline constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(5);

/// What a field leaves open is read from `tessera run`, torchrun, Slurm, Open MPI, MPICH or PMI, in
/// this order. Nothing anywhere: a world of one.
struct InitOptions {
  BackendOption backend = Backend::Auto;
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  /// A store of your own instead of `init_method`; needs `rank` and `world_size`.
  c10::intrusive_ptr<c10d::Store> store = {};
  /// "tcp://host:port" (rank 0 serves) or "file:///path" (a path all ranks see). Empty: from the
  /// launcher.
  std::string init_method = {};
  /// How long a collective waits for its peers before it names those that are missing.
  std::chrono::milliseconds timeout = kDefaultTimeout;
  std::optional<int> local_rank = std::nullopt;
  /// Index of this rank's CUDA device. None: the current one if that is not 0, else the one of the
  /// rank's number on its host, modulo their count. init() makes it the calling thread's current
  /// device. Given here, NCCL connects the groups when they are made, not at their first call, and
  /// the rank must use no other device with them.
  std::optional<int> device = std::nullopt;
  /// On this signal, which the process then handles, the rank writes its last collectives to
  /// standard error. 0: none. Kept off if the program already handles the signal.
  int dump_signal = 12;  // SIGUSR2
  /// How long a peer on this host that is stopped (SIGSTOP, a debugger) is waited for; 0: as long
  /// as any other. None: what `tessera run --stopped-timeout` says, else 30 s.
  std::optional<std::chrono::milliseconds> stopped_timeout = std::nullopt;
  /// A host that the store has not heard of for so long is lost: gloo collectives that wait for it
  /// fail and name it. 0: they wait for their timeout.
  std::chrono::milliseconds heartbeat_timeout = std::chrono::seconds(10);
  /// Ranks compare every collective before they use each other's data: operation, dtype, sizes,
  /// reduction, root, dim. Calls that do not go together are an error on all ranks, which names
  /// both sides. False, or TESSERA_CHECK_CALLS=0, alike on all ranks: gloo does not look, shm only
  /// where a rank reads a peer's data. nccl compares only when a call has timed out.
  bool check_calls = true;
  /// On CPUs replicate, fully_shard and compiled programs tell glibc, for the whole process and for
  /// good, to keep large blocks that are freed (mallopt). False: those after this init() don't. Nor
  /// do they where MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES is set.
  bool keep_freed_memory = true;
};

/// Joins the world. Every rank calls it once; blocks until all have, at most `timeout`. Throws if
/// already joined.
void init(InitOptions options = {});

/// Leaves the world and frees its groups. Safe to call twice, after errors, and not at all: it also
/// runs at exit.
void shutdown();

bool is_initialized();

/// Of the world. Without init() these throw, naming the remedy.
int rank();
int world_size();
/// Index of this rank on its host.
int local_rank();

/// All ranks of the world.
Group default_group();

/// Of NCCL's own options Tessera sets a stream of high priority, c10d's timeout (a minute after
/// ours) and, unless you have set it, NCCL_GRAPH_REGISTER=0. Others are its environment variables,
/// NCCL_*, set before init() and alike for all groups.
struct GroupOptions {
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;  // none: the default group's
  std::optional<BackendOption> backend = std::nullopt;              // none: the default group's
  std::string description = {};                                     // shown in errors, e.g. "dp"
  std::optional<bool> check_calls = std::nullopt;                   // none: the default group's
};

/// A group of these world ranks, in this order. The listed ranks (and no others) call it, with the
/// same list, in the same order as their other new_group calls for that list; blocks until all
/// have. Names agree on all ranks. Ranks that wait for each other with different lists (other
/// ranks, another order) get an error at once, which names both, and can't be mended but by another
/// init; a rank that does not call it is noticed when it ends, or after the timeout.
Group new_group(const std::vector<int>& ranks, GroupOptions options = {});

int rank(const Group& group);
int world_size(const Group& group);
/// World ranks of the group's members, by group rank.
std::vector<int> ranks(const Group& group);

/// Returns when every rank of the group has called it.
void barrier(const Group& group = {});
/// As barrier, but after `timeout` throws an error on every rank that arrived, which names those
/// that did not.
void monitored_barrier(const Group& group = {},
                       std::optional<std::chrono::milliseconds> timeout = std::nullopt);

/// `bytes` of group rank `source`, on every rank. Others pass anything.
std::string broadcast_bytes(const std::string& bytes, int source = 0, const Group& group = {});
/// Every rank's bytes by group rank, on every rank; lengths may differ.
std::vector<std::string> gather_bytes(const std::string& bytes, const Group& group = {});

/// Functional collectives: the argument is left alone, a new tensor is returned, complete. They are
/// `_c10d_functional` operators, so whatever records the dispatcher sees them, and they are
/// differentiable where the operation is: the loss is understood as the sum of all ranks' losses.
/// An empty group is the default group. Every rank of the group calls them in the same order.
at::Tensor all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::SUM,
                      const Group& group = {});
/// Concatenates the ranks' tensors (equal shapes) along `dim`.
at::Tensor all_gather(const at::Tensor& tensor, int64_t dim = 0, const Group& group = {});
/// Reduces, then keeps this rank's of `world_size(group)` equal parts along `dim`.
at::Tensor reduce_scatter(const at::Tensor& tensor, int64_t dim = 0, ReduceOp op = ReduceOp::SUM,
                          const Group& group = {});
/// Sends rows [sum(input_splits[:p]), + input_splits[p]) of `tensor` to rank p and stacks what
/// comes in rank order. Empty splits: equal parts.
at::Tensor all_to_all(const at::Tensor& tensor, const std::vector<int64_t>& output_splits = {},
                      const std::vector<int64_t>& input_splits = {}, const Group& group = {});
/// The tensor of group rank `source`; all ranks pass one of the same shape and dtype.
at::Tensor broadcast(const at::Tensor& tensor, int source = 0, const Group& group = {});

/// An uninitialised CPU tensor in memory that the group's other ranks can read: collectives of a
/// shm group skip the copy in. Freed like any tensor. Not collective. In a group that is not shm:
/// an ordinary tensor.
at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options = {},
                        const Group& group = {});

/// Backends this build has, in the order in which "auto" looks at them.
std::vector<std::string> available_backends();
/// Whether `backend`, which is not Auto, can move tensors of this device and dtype, e.g.
/// supports(Backend::Shm, torch::kCPU, torch::kHalf).
bool supports(const std::string& backend, c10::DeviceType device, c10::ScalarType dtype);
bool supports(Backend backend, c10::DeviceType device, c10::ScalarType dtype);

/// The last collectives of this rank in every group, as text: what ran, what waits.
std::string recent_collectives();

}  // namespace tessera
