// Attention to the keys of all ranks, which go round. See Note [ring].
#include <tessera/dtensor.h>
#include <tessera/parallel/context.h>

#include "comm/call_check.h"
#include "comm/functional.h"
#include "dtensor/debug.h"
#include "parallel/attention_block.h"
#include "parallel/ring.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/logaddexp.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

namespace tessera {
namespace parallel {

// Note [ring]
// In step i a rank has the keys and values of the rank i before it, and passes them on while it
// computes its queries' attention to them. Blocks of one row of scores are put together by their
// logsumexp: softmax over all keys is that over a block times the block's share of the sum. In
// backward the fused kernels are given the merged output and logsumexp, so that what they compute
// of a block is its part of the whole gradient. That of the keys travels with them, one step
// behind, a sum in the accumulation type to which each rank adds, and comes home after as many
// steps as there are ranks. Everything is put together in the order of the steps. Which pairs of
// chunks meet, for 2 ranks and a causal mask; rank 0 has chunks 0 and 3:
//
//            keys 0   keys 1   keys 2   keys 3
//   rank 0:  0 causal                             step 0, with its own keys, one causal block
//   rank 1:  1 all    causal
//   rank 1:  2 all    all      causal             rank 1 in step 1: all queries, keys 0
//   rank 0:  3 all    all      all      causal    rank 0 in step 1: queries 3, keys 1 and 2

std::optional<RingBlock> ring_block(const RingLayout& layout, int64_t source, int64_t queries,
                                    int64_t keys) {
  RingBlock block{.queries = {0, queries}, .keys = {0, keys}};
  if (!layout.is_causal) return block;
  if (source == layout.rank) {
    block.is_causal = true;
    return block;
  }
  if (source < layout.rank) {
    if (layout.load_balance) block.keys.length = keys / 2;
    return block;
  }
  if (!layout.load_balance) return std::nullopt;
  block.queries = {queries / 2, queries - queries / 2};
  return block;
}

Ring::Ring(Group group) : group_(std::move(group)) {}

at::Tensor Ring::pass_on(const at::Tensor& flat) const {
  std::vector<int64_t> sent(ranks(), 0), received(ranks(), 0);
  sent[(rank() + 1) % ranks()] = flat.numel();
  received[source(1)] = flat.numel();
  dtensor::count_collective("all_to_all", flat.nbytes());
  return comm::functional::all_to_all(flat, received, sent, group_);
}

at::Tensor Ring::wait(const at::Tensor& pending) { return comm::functional::wait(pending); }

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr const char* kRing = "ring_attention";

/// What one call computes, but for its tensors.
struct RingCall {
  Group group;
  bool is_causal;
  bool load_balance;
  double scale;

  RingLayout layout() const {
    return {group->getRank(), group->getSize(), is_causal, load_balance};
  }
};

/// Keys and values in one message.
struct KeysAndValues {
  at::Tensor flat;
  std::vector<int64_t> key_sizes, value_sizes;

  static KeysAndValues pack(const at::Tensor& key, const at::Tensor& value) {
    return {at::cat({key.reshape({-1}), value.reshape({-1})}), key.sizes().vec(),
            value.sizes().vec()};
  }
  at::Tensor key() const {
    return flat.narrow(0, 0, c10::multiply_integers(key_sizes)).view(key_sizes);
  }
  at::Tensor value() const {
    const auto begin = c10::multiply_integers(key_sizes);
    return flat.narrow(0, begin, flat.numel() - begin).view(value_sizes);
  }
  /// The same keys and values of another rank, or their gradients.
  KeysAndValues like(at::Tensor other) const { return {std::move(other), key_sizes, value_sizes}; }
};

at::Tensor cut(const at::Tensor& tensor, const dtensor::Chunk& chunk) {
  return tensor.narrow(2, chunk.offset, chunk.length);
}

/// Blocks of attention put together; the first one has all queries.
class Merger {
 public:
  void add(AttentionBlock block, const dtensor::Chunk& queries) {
    const auto type = accumulation_type(block.out.scalar_type());
    if (!merged_.out.defined()) {
      merged_ = {block.out.to(type), std::move(block.logsumexp)};
      return;
    }
    const auto sums = cut(merged_.logsumexp, queries);
    const auto share = (block.logsumexp - sums).sigmoid_().unsqueeze(-1);
    cut(merged_.out, queries).lerp_(block.out.to(type), share);
    sums.copy_(at::logaddexp(sums, block.logsumexp));
  }
  AttentionBlock result(at::ScalarType dtype) const {
    return {merged_.out.to(dtype), merged_.logsumexp};
  }

 private:
  AttentionBlock merged_;
};

/// Kernels are given tensors of the dtypes that they have to work in.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

AttentionBlock ring_forward(const at::Tensor& query, KeysAndValues held, const RingCall& call) {
  const Ring ring(call.group);
  Merger merger;
  at::Tensor pending;
  for (int64_t step = 0; step < ring.ranks(); ++step) {
    if (step > 0) held = held.like(Ring::wait(pending));
    if (step + 1 < ring.ranks()) pending = ring.pass_on(held.flat);
    const auto block =
        ring_block(call.layout(), ring.source(step), query.size(2), held.key_sizes[2]);
    if (!block) continue;
    merger.add(attend(cut(query, block->queries), cut(held.key(), block->keys),
                      cut(held.value(), block->keys), block->is_causal, call.scale),
               block->queries);
  }
  return merger.result(query.scalar_type());
}

AttentionBlockGradients ring_backward(const at::Tensor& grad_out, const at::Tensor& query,
                                      KeysAndValues held, const AttentionBlock& merged,
                                      const RingCall& call) {
  const Ring ring(call.group);
  const auto type = accumulation_type(query.scalar_type());
  at::Tensor of_query, pending, pending_sums;
  KeysAndValues sums;
  for (int64_t step = 0; step < ring.ranks(); ++step) {
    if (step > 0) held = held.like(Ring::wait(pending));
    if (step + 1 < ring.ranks()) pending = ring.pass_on(held.flat);
    const auto block =
        ring_block(call.layout(), ring.source(step), query.size(2), held.key_sizes[2]);
    AttentionBlockGradients gradients;
    if (block) {
      const auto& queries = block->queries;
      gradients = attend_backward(cut(grad_out, queries), cut(query, queries),
                                  cut(held.key(), block->keys), cut(held.value(), block->keys),
                                  {cut(merged.out, queries), cut(merged.logsumexp, queries)},
                                  block->is_causal, call.scale);
    }
    if (step == 0) {  // all queries and all keys
      of_query = gradients.query.to(type);
      sums = KeysAndValues::pack(gradients.key.to(type), gradients.value.to(type));
    } else {
      sums = sums.like(Ring::wait(pending_sums));
    }
    if (step > 0 && block) {
      cut(of_query, block->queries).add_(gradients.query);
      cut(sums.key(), block->keys).add_(gradients.key);
      cut(sums.value(), block->keys).add_(gradients.value);
    }
    if (ring.ranks() > 1) pending_sums = ring.pass_on(sums.flat);
  }
  if (ring.ranks() > 1) sums = sums.like(Ring::wait(pending_sums));
  return {of_query, sums.key(), sums.value()};
}

struct RingAttention : torch::autograd::Function<RingAttention> {
  static Variable forward(AutogradContext* context, const Variable& query, const Variable& key,
                          const Variable& value, const RingCall& call) {
    const WithoutAutocast without_autocast;
    const auto held = KeysAndValues::pack(key, value);
    auto merged = ring_forward(query, held, call);
    context->save_for_backward({query, held.flat, merged.out, merged.logsumexp});
    context->saved_data["key_sizes"] = held.key_sizes;
    context->saved_data["value_sizes"] = held.value_sizes;
    context->saved_data["group"] = call.group->getGroupName();
    context->saved_data["is_causal"] = call.is_causal;
    context->saved_data["load_balance"] = call.load_balance;
    context->saved_data["scale"] = call.scale;
    return merged.out;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), kRing,
                                ": expected a backward without create_graph, since it can't be "
                                "differentiated twice");
    const WithoutAutocast without_autocast;
    auto& data = context->saved_data;
    const RingCall call{.group = c10d::resolve_process_group(data["group"].toStringRef()),
                        .is_causal = data["is_causal"].toBool(),
                        .load_balance = data["load_balance"].toBool(),
                        .scale = data["scale"].toDouble()};
    const auto saved = context->get_saved_variables();
    const KeysAndValues held{saved[1], data["key_sizes"].toIntVector(),
                             data["value_sizes"].toIntVector()};
    const auto dtype = saved[0].scalar_type();
    const auto result =
        ring_backward(gradients[0].to(dtype), saved[0], held, {saved[2], saved[3]}, call);
    return {result.query.to(dtype), result.key.to(dtype), result.value.to(dtype), {}};
  }
};

void check_tensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   bool enable_gqa) {
  const auto all = [&] { return c10::str(query.sizes(), ", ", key.sizes(), ", ", value.sizes()); };
  for (const auto* tensor : {&query, &key, &value}) {
    TORCH_CHECK_VALUE(tensor->defined() && tensor->dim() == 4 && tensor->numel() > 0, kRing,
                      ": expected query, key and value of [batch, heads, local_length, head_dim], "
                      "none of them empty, got ",
                      tensor->defined() ? c10::str(tensor->sizes()) : "an undefined tensor");
  }
  TORCH_CHECK_VALUE(query.scalar_type() == key.scalar_type() &&
                        query.scalar_type() == value.scalar_type() && query.is_floating_point(),
                    kRing, ": expected query, key and value of one floating-point dtype, got ",
                    query.scalar_type(), ", ", key.scalar_type(), " and ", value.scalar_type());
  TORCH_CHECK_VALUE(query.device() == key.device() && query.device() == value.device(), kRing,
                    ": expected query, key and value on one device, got ", query.device(), ", ",
                    key.device(), " and ", value.device());
  TORCH_CHECK_VALUE(query.size(0) == key.size(0) && query.size(0) == value.size(0) &&
                        key.size(1) == value.size(1) && key.size(2) == value.size(2) &&
                        query.size(3) == key.size(3),
                    kRing,
                    ": expected one batch size, as many keys as values and one head_dim of "
                    "queries and keys, got sizes ",
                    all());
  TORCH_CHECK_VALUE(
      query.size(1) == key.size(1) || (enable_gqa && query.size(1) % key.size(1) == 0), kRing,
      ": expected as many heads of queries as of keys", enable_gqa ? ", or a multiple" : "",
      ", got sizes ", all(), enable_gqa ? "" : "; for groups of heads set .enable_gqa");
}

void check_lengths(const at::Tensor& query, const at::Tensor& key,
                   const RingAttentionOptions& options, int64_t ranks) {
  if (!options.is_causal) return;
  TORCH_CHECK_VALUE(query.size(2) == key.size(2), kRing,
                    ": expected as many queries as keys for is_causal, got ", query.size(2),
                    " and ", key.size(2));
  TORCH_CHECK_VALUE(!options.load_balance || ranks == 1 || query.size(2) % 2 == 0, kRing,
                    ": expected an even local_length, two chunks of the sequence, got ",
                    query.size(2), "; cut it by context_parallel_shard, or without .load_balance");
}

/// What autocast does for scaled_dot_product_attention.
at::Tensor autocasted(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto type = tensor.device().type();
  if (!at::autocast::is_autocast_available(type) || !at::autocast::is_autocast_enabled(type))
    return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(type), tensor, type);
}

/// Kernels for CUDA want rows of 16 bytes; zeros change neither scores nor the rest of the result.
at::Tensor padded(const at::Tensor& tensor) {
  constexpr int64_t kNumbers = 8;
  const auto missing = (kNumbers - tensor.size(-1) % kNumbers) % kNumbers;
  return missing == 0 ? tensor : at::constant_pad_nd(tensor, {0, missing});
}

at::Tensor ring_of_plain(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const DeviceMesh& mesh, const RingAttentionOptions& options) {
  check_tensors(query, key, value, options.enable_gqa);
  check_lengths(query, key, options, mesh.size());
  const RingCall call{
      .group = mesh.group(),
      .is_causal = options.is_causal,
      .load_balance = options.load_balance,
      .scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))))};
  const comm::CallNote note(c10::str("ring_attention, keys ", key.sizes()));
  if (!query.is_cuda()) return RingAttention::apply(query, key, value, call);
  return RingAttention::apply(padded(query), padded(key), padded(value), call)
      .narrow(-1, 0, value.size(-1));
}

/// Every rank of the tensors' own mesh has whole samples, or whole heads with all that belongs to
/// them.
at::Tensor ring_of_distributed(const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const DeviceMesh& mesh,
                               const RingAttentionOptions& options) {
  for (const auto* tensor : {&query, &key, &value})
    TORCH_CHECK_VALUE(is_dtensor(*tensor), kRing,
                      ": expected query, key and value to be DTensors, or plain tensors, all of "
                      "them; got both");
  const auto first = DTensor::of(query);
  for (const auto& tensor : {first, DTensor::of(key), DTensor::of(value)}) {
    TORCH_CHECK_VALUE(tensor.mesh() == first.mesh() && tensor.placements() == first.placements(),
                      kRing, ": expected DTensors of one mesh, placed alike, got ",
                      c10::str(first.placements()), " on ", c10::str(first.mesh()), " and ",
                      c10::str(tensor.placements()), " on ", c10::str(tensor.mesh()));
    for (size_t i = 0; i < tensor.placements().size(); ++i) {
      const auto& placement = tensor.placements()[i];
      const bool is_apart =
          placement.is_shard() && (placement.dim() == 0 || placement.dim() == 1) &&
          tensor.size(placement.dim()) % tensor.mesh().size(static_cast<int64_t>(i)) == 0;
      TORCH_CHECK_VALUE(placement.is_replicate() || is_apart, kRing,
                        ": expected DTensors sharded by batch or heads, evenly, got sizes ",
                        tensor.sizes(), " placed ", c10::str(tensor.placements()),
                        "; redistribute them, and cut the sequence by context_parallel_shard");
    }
  }
  const auto local = ring_of_plain(first.to_local(), DTensor::of(key).to_local(),
                                   DTensor::of(value).to_local(), mesh, options);
  return DTensor::from_local(local, first.mesh(), first.placements());
}

}  // namespace
}  // namespace parallel

at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const RingAttentionOptions& options) {
  using namespace parallel;
  const auto mesh = options.mesh ? options.mesh : current_mesh();
  TORCH_CHECK_VALUE(mesh, kRing, ": expected a mesh, or a MeshScope around the call, got neither; ",
                    "pass one, e.g. {.mesh = mesh[\"cp\"]}");
  TORCH_CHECK_VALUE(mesh->ndim() == 1, kRing, ": expected a 1-D mesh, got ", mesh->ndim(), "-D ",
                    c10::str(*mesh), "; slice it first, e.g. mesh[\"cp\"]");
  const auto dims = query.defined() ? query.dim() : 0;
  if (dims == 2 || dims == 3) {
    const auto with_all = [&](const at::Tensor& tensor) {
      return tensor.defined() && tensor.dim() == dims ? tensor.unsqueeze(0) : tensor;
    };
    return ring_attention(with_all(query), with_all(key), with_all(value), options).squeeze(0);
  }
  const auto q = autocasted(query), k = autocasted(key), v = autocasted(value);
  if (is_dtensor(q) || is_dtensor(k) || is_dtensor(v))
    return ring_of_distributed(q, k, v, *mesh, options);
  return ring_of_plain(q, k, v, *mesh, options);
}

}  // namespace tessera
