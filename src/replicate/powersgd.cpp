#include "replicate/powersgd.h"

#include "dtensor/part.h"
#include "replicate/buckets.h"
#include "replicate/comm_hooks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <utility>

namespace tessera {
namespace {

using detail::replicate::average;
using detail::replicate::future_of;
using namespace powersgd;

/// Parts of a flat tensor, one per batch, of [count, its size, rank].
std::vector<at::Tensor> split(const at::Tensor& flat, int64_t offset,
                              const std::vector<Batch>& batches, int64_t Factors::* size) {
  std::vector<at::Tensor> parts;
  for (const auto& batch : batches) {
    const int64_t length = batch.factors.*size, rank = batch.factors.rank;
    const int64_t elements = batch.count() * length * rank;
    parts.push_back(flat.narrow(0, offset, elements).view({batch.count(), length, rank}));
    offset += elements;
  }
  return parts;
}

int64_t elements_of(const std::vector<Batch>& batches, int64_t Factors::* size) {
  int64_t elements = 0;
  for (const auto& batch : batches)
    elements += batch.count() * batch.factors.*size * batch.factors.rank;
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

}  // namespace

/// As numpy's RandomState(seed).randint(10**9), from which Python's hook seeds its generator.
uint64_t PowerSGDState::Impl::next_seed() {
  constexpr uint32_t kBelow = 1'000'000'000;
  constexpr uint32_t kMask = (uint32_t{1} << 30) - 1;
  while (true) {
    const auto drawn = static_cast<uint32_t>(random()) & kMask;
    if (drawn < kBelow) return drawn;
  }
}

Factors PowerSGDState::Impl::factors_of(const at::Tensor& gradient) const {
  const int64_t rows = gradient.dim() < 2 ? 0 : gradient.size(0);
  const int64_t columns = rows == 0 ? 0 : gradient.numel() / rows;
  const int64_t rank = std::min({rows, columns, options.matrix_approximation_rank});
  const auto compressed = static_cast<double>((rows + columns) * rank);
  const bool shrinks =
      compressed * options.min_compression_rate < static_cast<double>(rows * columns);
  return {rows, columns, shrinks ? rank : 0};
}

Plan PowerSGDState::Impl::plan(GradBucket& bucket) {
  Plan plan;
  // By shape, in the order of their first gradients.
  std::vector<Batch> shapes;
  const auto gradients = bucket.gradients();
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto factors = factors_of(gradients[i]);
    if (factors.rank == 0) {
      plan.uncompressed.push_back(gradients[i]);
      continue;
    }
    auto same = std::ranges::find(shapes, factors, &Batch::factors);
    if (same == shapes.end()) same = shapes.insert(same, {.factors = factors, .members = {}});
    auto& remembered = memory[bucket.parameters()[i].unsafeGetTensorImpl()];
    // Another parameter may have come to where one was that is gone.
    const bool is_other =
        (remembered.error.defined() && remembered.error.sizes() != gradients[i].sizes()) ||
        (remembered.q.defined() &&
         remembered.q.sizes() != at::IntArrayRef{factors.columns, factors.rank});
    if (is_other) remembered = {};
    same->members.push_back({gradients[i], &remembered});
  }
  for (auto& batch : shapes) {
    if (options.batch_tensors_with_same_shape) {
      plan.batches.push_back(std::move(batch));
      continue;
    }
    for (const auto& member : batch.members) plan.batches.push_back({batch.factors, {member}});
  }
  return plan;
}

/// By batch, with orthonormal columns.
std::vector<at::Tensor> PowerSGDState::Impl::prepare_q(const Plan& plan, const at::Tensor& buffer) {
  const auto lacks_q = [](const Member& member) { return !member.remembered->q.defined(); };
  const bool draws =
      !options.warm_start || std::ranges::any_of(plan.batches, [&](const auto& batch) {
        return std::ranges::any_of(batch.members, lacks_q);
      });
  if (draws) {
    // The same numbers on all ranks, others in every iteration: a direction that one projection
    // misses is seen by the next.
    auto generator = at::detail::createCPUGenerator(next_seed());
    for (const auto& batch : plan.batches) {
      const auto drawn = at::randn({batch.count(), batch.factors.columns, batch.factors.rank},
                                   generator, buffer.options().device(c10::kCPU))
                             .to(buffer.device());
      for (int64_t i = 0; i < batch.count(); ++i) {
        const auto& member = batch.members[static_cast<size_t>(i)];
        if (options.warm_start && !lacks_q(member)) continue;
        member.remembered->q = drawn[i].clone();
        member.remembered->spare = drawn[i].clone();
      }
    }
  }
  std::vector<at::Tensor> prepared;
  for (const auto& batch : plan.batches) {
    prepared.push_back(batch.together([](const Member& member) { return member.remembered->q; }));
    revive(prepared.back(),
           batch.together([](const Member& member) { return member.remembered->spare; }));
    orthogonalize(prepared.back(), options.orthogonalization_epsilon);
  }
  return prepared;
}

void PowerSGDState::Impl::reduce_p(Round& round, const Group& group) const {
  const auto& batches = round.plan.batches;
  int64_t plain = 0;
  for (const auto& gradient : round.plan.uncompressed) plain += gradient.numel();
  // One message: what is not compressed, then every P.
  const auto message =
      at::empty({plain + elements_of(batches, &Factors::rows)}, round.buffer.options());
  round.p = split(message, plain, batches, &Factors::rows);
  for (size_t i = 0; i < batches.size(); ++i)
    at::bmm_out(round.p[i], batches[i].matrices(), round.q[i]);
  const auto for_each_plain = [&](auto&& copy) {
    int64_t offset = 0;
    for (const auto& gradient : round.plan.uncompressed) {
      copy(gradient, message.narrow(0, offset, gradient.numel()).view(gradient.sizes()));
      offset += gradient.numel();
    }
  };
  for_each_plain([](const at::Tensor& gradient, const at::Tensor& part) { part.copy_(gradient); });
  const auto work = average(message, group);
  if (work) work->wait();
  for_each_plain([](const at::Tensor& gradient, const at::Tensor& part) { gradient.copy_(part); });
  for (const auto& p : round.p) orthogonalize(p, options.orthogonalization_epsilon);
}

void PowerSGDState::Impl::decompress(const Round& round) const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < round.plan.batches.size(); ++i) {
    const auto& batch = round.plan.batches[i];
    const auto matrices = at::bmm(round.p[i], round.q[i].transpose(1, 2));
    for (int64_t k = 0; k < batch.count(); ++k) {
      const auto& [gradient, remembered] = batch.members[static_cast<size_t>(k)];
      gradient.copy_(matrices[k].view(gradient.sizes()));
      if (options.warm_start) remembered->q.copy_(round.q[i][k]);
      if (!options.use_error_feedback) continue;
      const auto offset = gradient.storage_offset() - round.buffer.storage_offset();
      const auto own = round.own.as_strided(gradient.sizes(), gradient.strides(), offset);
      remembered->error = (own - gradient).nan_to_num_(0, 0, 0);
    }
  }
}

BucketFuture PowerSGDState::Impl::average_bucket(GradBucket& bucket,
                                                 std::shared_ptr<PowerSGDState> owner) {
  const bool is_plain = iteration < options.start_powerSGD_iter;
  if (bucket.is_last()) ++iteration;
  if (is_plain || !bucket.buffer().is_floating_point()) return allreduce_hook(bucket);
  const at::NoGradGuard no_grad;
  Round round{.buffer = bucket.buffer(), .own = {}, .plan = plan(bucket), .p = {}, .q = {}};
  if (round.plan.batches.empty()) return allreduce_hook(bucket);
  if (options.use_error_feedback) {
    for (const auto& batch : round.plan.batches) {
      for (const auto& [gradient, remembered] : batch.members) {
        if (remembered->error.defined()) gradient.add_(remembered->error);
      }
    }
    round.own = round.buffer.clone();
  }
  round.q = prepare_q(round.plan, round.buffer);
  // Here and not in a future: a second message sent by whoever completes the first would come
  // before or after the next bucket's, as it happens.
  reduce_p(round, bucket.group());
  const auto message =
      at::empty({elements_of(round.plan.batches, &Factors::columns)}, round.buffer.options());
  round.q = split(message, 0, round.plan.batches, &Factors::columns);
  for (size_t i = 0; i < round.q.size(); ++i)
    at::bmm_out(round.q[i], round.plan.batches[i].matrices().transpose(1, 2), round.p[i]);
  return future_of(average(message, bucket.group()),
                   [owner = std::move(owner), round = std::move(round)] {
                     owner->impl_->decompress(round);
                     return round.buffer;
                   });
}

// What PowerSGD remembers between iterations, and how it is saved.

namespace {

using powersgd::CompressionState;
using powersgd::Factors;
using Saved = std::map<std::string, std::string>;

constexpr const char* kIteration = "powersgd/iteration";
constexpr const char* kRandom = "powersgd/random";

std::string key(const std::string& parameter, const char* what) {
  return "powersgd/" + parameter + "/" + what;
}

std::string bytes_of(const at::Tensor& tensor) {
  const auto host = tensor.cpu().contiguous();
  return {static_cast<const char*>(host.const_data_ptr()), host.nbytes()};
}

/// The saved tensor of this name; undefined if there is none.
at::Tensor find(const Saved& saved, const std::string& name, at::IntArrayRef sizes,
                const at::Tensor& like) {
  const auto found = saved.find(name);
  if (found == saved.end()) return {};
  auto tensor = at::empty(sizes, like.options().device(at::kCPU).requires_grad(false));
  TORCH_CHECK_VALUE(found->second.size() == tensor.nbytes(), "PowerSGDState::load: expected ",
                    tensor.nbytes(), " bytes of ", name, ", got ", found->second.size(),
                    "; load what was saved for this model with these options");
  std::memcpy(tensor.mutable_data_ptr(), found->second.data(), tensor.nbytes());
  return tensor.to(like.device());
}

}  // namespace

PowerSGDState::PowerSGDState(PowerSGDOptions options) : impl_(std::make_unique<Impl>(options)) {
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
}

PowerSGDState::~PowerSGDState() = default;

BucketFuture PowerSGDHook::operator()(GradBucket& bucket) const {
  return state->impl_->average_bucket(bucket, state);
}

CommHook PowerSGDState::hook() { return PowerSGDHook{shared_from_this()}; }

CommHook powersgd_hook(PowerSGDOptions options) {
  return std::make_shared<PowerSGDState>(options)->hook();
}

Saved PowerSGDState::save(const torch::nn::Module& module) const {
  std::ostringstream random;
  random << impl_->random;
  Saved saved = {{kIteration, std::to_string(impl_->iteration)}, {kRandom, random.str()}};
  for (const auto& parameter : module.named_parameters()) {
    const auto part = dtensor::local_part(parameter.value());
    const auto found = impl_->memory.find(part.unsafeGetTensorImpl());
    if (found == impl_->memory.end()) continue;
    const auto& [error, q, spare] = found->second;
    if (error.defined()) saved[key(parameter.key(), "error")] = bytes_of(error);
    if (q.defined()) saved[key(parameter.key(), "q")] = bytes_of(q);
    if (spare.defined()) saved[key(parameter.key(), "spare")] = bytes_of(spare);
  }
  return saved;
}

void PowerSGDState::load(const torch::nn::Module& module, const Saved& saved) {
  Impl fresh(impl_->options);
  if (const auto found = saved.find(kIteration); found != saved.end()) {
    std::istringstream iteration(found->second);
    std::istringstream random(saved.contains(kRandom) ? saved.at(kRandom) : "");
    iteration >> fresh.iteration;
    random >> fresh.random;
    TORCH_CHECK_VALUE(iteration && random && fresh.iteration >= 0,
                      "PowerSGDState::load: expected what save() gave, got an iteration '",
                      found->second, "' or a state of random numbers that can't be read");
  }
  for (const auto& parameter : module.named_parameters()) {
    const auto tensor = dtensor::local_part(parameter.value());
    const auto [rows, columns, rank] = impl_->factors_of(tensor);
    CompressionState remembered = {
        .error = find(saved, key(parameter.key(), "error"), tensor.sizes(), tensor),
        .q = find(saved, key(parameter.key(), "q"), {columns, rank}, tensor),
        .spare = find(saved, key(parameter.key(), "spare"), {columns, rank}, tensor)};
    TORCH_CHECK_VALUE(remembered.q.defined() == remembered.spare.defined(),
                      "PowerSGDState::load: expected q and spare of ", parameter.key(),
                      ", got only one of them; load what save() gave");
    if (remembered.error.defined() || remembered.q.defined())
      fresh.memory[tensor.unsafeGetTensorImpl()] = std::move(remembered);
  }
  *impl_ = std::move(fresh);
}

}  // namespace tessera
