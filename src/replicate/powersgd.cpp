#include "replicate/bucket.h"
#include "replicate/hook_futures.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>

namespace tessera {
namespace {

using replication::average;
using replication::future_of;

/// Gradients of one shape, or a single one, that are compressed in one go.
struct Batch {
  int64_t rows;
  int64_t columns;
  int64_t rank;
  std::vector<at::Tensor> gradients;

  int64_t count() const { return static_cast<int64_t>(gradients.size()); }
  at::Tensor matrices() const {  // [count, rows, columns]
    std::vector<at::Tensor> flat;
    for (const auto& gradient : gradients) flat.push_back(gradient.reshape({rows, columns}));
    return flat.size() == 1 ? flat[0].unsqueeze(0) : at::stack(flat);
  }
};

/// Which gradients of a bucket travel how.
struct Plan {
  std::vector<Batch> batches;
  std::vector<size_t> uncompressed;  // positions in the bucket
};

/// Kept between iterations, per bucket.
struct Memory {
  std::vector<const at::TensorImpl*> parameters;
  at::Tensor error;               // flat, as the bucket
  std::vector<at::Tensor> q;      // by batch: [count, columns, rank]
  std::vector<at::Tensor> spare;  // random columns for those of q that died
};

/// Parts of a flat tensor, one per batch, of [count, its size, rank].
std::vector<at::Tensor> split(const at::Tensor& flat, int64_t offset,
                              const std::vector<Batch>& batches, int64_t Batch::* size) {
  std::vector<at::Tensor> parts;
  for (const auto& batch : batches) {
    const int64_t elements = batch.count() * batch.*size * batch.rank;
    parts.push_back(
        flat.narrow(0, offset, elements).view({batch.count(), batch.*size, batch.rank}));
    offset += elements;
  }
  return parts;
}

int64_t elements_of(const std::vector<Batch>& batches, int64_t Batch::* size) {
  int64_t elements = 0;
  for (const auto& batch : batches) elements += batch.count() * batch.*size * batch.rank;
  return elements;
}

/// Makes the columns of every matrix orthonormal, in place.
void orthogonalize(const at::Tensor& matrices, double epsilon) {
  const int64_t rank = matrices.size(2);
  // Few columns, and types that QR does not know: Gram-Schmidt.
  if (rank > 2 && !at::isReducedFloatingType(matrices.scalar_type())) {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
    return;
  }
  for (int64_t i = 0; i < rank; ++i) {
    const auto column = matrices.narrow(2, i, 1);
    const auto norm = at::linalg_vector_norm(column, 2, {1}, /*keepdim=*/true);
    column.div_(epsilon == 0 ? norm.masked_fill(norm == 0, 1) : norm + epsilon);
    if (i + 1 == rank) break;
    const auto rest = matrices.narrow(2, i + 1, rank - i - 1);
    rest.sub_((column * rest).sum(1, /*keepdim=*/true) * column);
  }
}

/// A column of zeros (a gradient that vanished for once) would stay zero for ever, one of nan nan.
void revive(const at::Tensor& q, const at::Tensor& spare) {
  const auto norm = at::linalg_vector_norm(q, 2, {1}, /*keepdim=*/true);
  q.copy_(at::where(at::isfinite(norm).logical_and(norm > 0), q, spare));
}

class PowerSGD : public std::enable_shared_from_this<PowerSGD> {
 public:
  explicit PowerSGD(PowerSGDOptions options) : options_(options), random_(options.random_seed) {}

  BucketFuture average_bucket(GradBucket& bucket);

 private:
  /// One bucket on its way.
  struct Round {
    at::Tensor buffer;
    at::Tensor own;  // before compression, with the old error
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> parameters;
    Plan plan;
    std::vector<at::Tensor> p, q;
    std::shared_ptr<Memory> memory;
  };
  Plan plan(const std::vector<at::Tensor>& gradients) const;
  std::shared_ptr<Memory> memory_of(const GradBucket& bucket);
  void prepare_q(Memory& memory, const std::vector<Batch>& batches, const at::Tensor& buffer);
  void reduce_p(Round& round, const Group& group) const;
  void decompress(const Round& round) const;
  uint64_t next_seed();

  PowerSGDOptions options_;
  std::mt19937 random_;
  int64_t iteration_ = 0;
  std::map<size_t, std::shared_ptr<Memory>> memories_;  // by bucket
};

/// As numpy's RandomState(seed).randint(10**9), from which Python's hook seeds its generator.
uint64_t PowerSGD::next_seed() {
  constexpr uint32_t kBelow = 1'000'000'000;
  constexpr uint32_t kMask = (uint32_t{1} << 30) - 1;
  while (true) {
    const auto drawn = static_cast<uint32_t>(random_()) & kMask;
    if (drawn < kBelow) return drawn;
  }
}

Plan PowerSGD::plan(const std::vector<at::Tensor>& gradients) const {
  Plan plan;
  // By shape, in the order of their first gradients.
  std::vector<Batch> shapes;
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& gradient = gradients[i];
    const int64_t rows = gradient.dim() < 2 ? 0 : gradient.size(0);
    const int64_t columns = rows == 0 ? 0 : gradient.numel() / rows;
    const int64_t rank = std::min({rows, columns, options_.matrix_approximation_rank});
    const auto compressed = static_cast<double>((rows + columns) * rank);
    if (rank == 0 ||
        compressed * options_.min_compression_rate >= static_cast<double>(rows * columns)) {
      plan.uncompressed.push_back(i);
      continue;
    }
    auto same = std::find_if(shapes.begin(), shapes.end(), [&](const Batch& batch) {
      return batch.rows == rows && batch.columns == columns;
    });
    if (same == shapes.end())
      same = shapes.insert(same, {.rows = rows, .columns = columns, .rank = rank, .gradients = {}});
    same->gradients.push_back(gradient);
  }
  for (auto& batch : shapes) {
    if (options_.batch_tensors_with_same_shape) {
      plan.batches.push_back(std::move(batch));
      continue;
    }
    for (const auto& gradient : batch.gradients)
      plan.batches.push_back({batch.rows, batch.columns, batch.rank, {gradient}});
  }
  return plan;
}

std::shared_ptr<Memory> PowerSGD::memory_of(const GradBucket& bucket) {
  std::vector<const at::TensorImpl*> parameters;
  for (const auto& parameter : bucket.parameters())
    parameters.push_back(parameter.unsafeGetTensorImpl());
  auto& memory = memories_[bucket.index()];
  // Buckets are made again after the first backward.
  if (!memory || memory->parameters != parameters) {
    memory = std::make_shared<Memory>();
    memory->parameters = std::move(parameters);
  }
  return memory;
}

void PowerSGD::prepare_q(Memory& memory, const std::vector<Batch>& batches,
                         const at::Tensor& buffer) {
  if (memory.q.empty() || !options_.warm_start) {
    memory.q.clear();
    memory.spare.clear();
    // The same numbers on all ranks, others in every iteration: a direction that one projection
    // misses is seen by the next.
    auto generator = at::detail::createCPUGenerator(next_seed());
    for (const auto& batch : batches) {
      memory.q.push_back(at::randn({batch.count(), batch.columns, batch.rank}, generator,
                                   buffer.options().device(c10::kCPU))
                             .to(buffer.device()));
      memory.spare.push_back(memory.q.back().clone());
    }
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    revive(memory.q[i], memory.spare[i]);
    orthogonalize(memory.q[i], options_.orthogonalization_epsilon);
  }
}

void PowerSGD::reduce_p(Round& round, const Group& group) const {
  const auto& batches = round.plan.batches;
  int64_t plain = 0;
  for (const size_t i : round.plan.uncompressed) plain += round.gradients[i].numel();
  // One message: what is not compressed, then every P.
  const auto message =
      at::empty({plain + elements_of(batches, &Batch::rows)}, round.buffer.options());
  round.p = split(message, plain, batches, &Batch::rows);
  for (size_t i = 0; i < batches.size(); ++i)
    at::bmm_out(round.p[i], batches[i].matrices(), round.memory->q[i]);
  const auto for_each_plain = [&](auto&& copy) {
    int64_t offset = 0;
    for (const size_t i : round.plan.uncompressed) {
      const auto& gradient = round.gradients[i];
      copy(gradient, message.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
      offset += gradient.numel();
    }
  };
  for_each_plain([](const at::Tensor& gradient, const at::Tensor& part) { part.copy_(gradient); });
  const auto work = average(message, group);
  if (work) work->wait();
  for_each_plain([](const at::Tensor& gradient, const at::Tensor& part) { gradient.copy_(part); });
  for (const auto& p : round.p) orthogonalize(p, options_.orthogonalization_epsilon);
}

void PowerSGD::decompress(const Round& round) const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < round.plan.batches.size(); ++i) {
    const auto& batch = round.plan.batches[i];
    const auto matrices = at::bmm(round.p[i], round.q[i].transpose(1, 2));
    for (int64_t member = 0; member < batch.count(); ++member) {
      const auto& gradient = batch.gradients[static_cast<size_t>(member)];
      gradient.copy_(matrices[member].view(gradient.sizes()));
    }
    if (options_.warm_start) round.memory->q[i].copy_(round.q[i]);
  }
  if (!options_.use_error_feedback) return;
  auto& error = round.memory->error;
  error = (round.own - round.buffer).nan_to_num_(0, 0, 0);
  // What is not compressed has no error: the difference is that of the ranks.
  int64_t offset = 0;
  auto plain = round.plan.uncompressed.begin();
  for (size_t i = 0; i < round.parameters.size(); ++i) {
    const int64_t elements = round.parameters[i].numel();
    if (plain != round.plan.uncompressed.end() && *plain == i) {
      error.narrow(0, offset, elements).zero_();
      ++plain;
    }
    offset += elements;
  }
}

BucketFuture PowerSGD::average_bucket(GradBucket& bucket) {
  const bool is_plain = iteration_ < options_.start_powerSGD_iter;
  if (bucket.is_last()) ++iteration_;
  if (is_plain || !bucket.buffer().is_floating_point()) return allreduce_hook(bucket);
  const at::NoGradGuard no_grad;
  const auto gradients = bucket.gradients();
  Round round{.buffer = bucket.buffer(),
              .own = {},
              .gradients = gradients,
              .parameters = bucket.parameters(),
              .plan = plan(gradients),
              .p = {},
              .q = {},
              .memory = {}};
  if (round.plan.batches.empty()) return allreduce_hook(bucket);
  round.memory = memory_of(bucket);
  if (options_.use_error_feedback) {
    if (round.memory->error.defined()) round.buffer.add_(round.memory->error);
    round.own = round.buffer.clone();
  }
  prepare_q(*round.memory, round.plan.batches, round.buffer);
  // Here and not in a future: a second message sent by whoever completes the first would come
  // before or after the next bucket's, as it happens.
  reduce_p(round, bucket.group());
  const auto message =
      at::empty({elements_of(round.plan.batches, &Batch::columns)}, round.buffer.options());
  round.q = split(message, 0, round.plan.batches, &Batch::columns);
  for (size_t i = 0; i < round.q.size(); ++i)
    at::bmm_out(round.q[i], round.plan.batches[i].matrices().transpose(1, 2), round.p[i]);
  return future_of(average(message, bucket.group()),
                   [self = shared_from_this(), round = std::move(round)] {
                     self->decompress(round);
                     return round.buffer;
                   });
}

}  // namespace

CommHook powersgd_hook(PowerSGDOptions options) {
  TORCH_CHECK_VALUE(options.matrix_approximation_rank >= 1,
                    "powersgd_hook: expected matrix_approximation_rank of at least 1, got ",
                    options.matrix_approximation_rank);
  TORCH_CHECK_VALUE(options.start_powerSGD_iter >= 0,
                    "powersgd_hook: expected start_powerSGD_iter of at least 0, got ",
                    options.start_powerSGD_iter);
  TORCH_CHECK_VALUE(options.min_compression_rate > 0,
                    "powersgd_hook: expected min_compression_rate above 0, got ",
                    options.min_compression_rate);
  TORCH_CHECK_VALUE(
      options.orthogonalization_epsilon >= 0 && std::isfinite(options.orthogonalization_epsilon),
      "powersgd_hook: expected orthogonalization_epsilon of at least 0, got ",
      options.orthogonalization_epsilon);
  return [state = std::make_shared<PowerSGD>(options)](GradBucket& bucket) {
    return state->average_bucket(bucket);
  };
}

}  // namespace tessera
