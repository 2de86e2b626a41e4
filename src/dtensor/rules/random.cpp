// Operators that draw. See Note [drawing the whole].
#include "dtensor/random.h"

#include "dtensor/rules.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <optional>

namespace tessera::dtensor {
namespace {

Rows any_shard(const Call& call, int64_t) {
  Rows rows;
  for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim) {
    auto row = call.row(Shard(dim));
    row[call.output_count()] = Shard(dim);
    rows.emplace_back(std::move(row));
  }
  return rows;
}

/// What is drawn does not depend on the values of the argument.
Rows any_placement(const Call& call, int64_t ranks) {
  auto rows = any_shard(call, ranks);
  if (const auto& spec = call.operand(0).spec) {
    for (const auto& placement : spec->placements) {
      if (!placement.is_partial()) continue;
      auto row = call.row();
      row[call.output_count()] = placement;
      rows.emplace_back(std::move(row));
    }
  }
  return rows;
}

Rule drawing(std::function<Rows(const Call&, int64_t)> rows, RunLocal run) {
  Rule rule;
  rule.rows = std::move(rows);
  rule.run = std::move(run);
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  return rule;
}

size_t index_of(const c10::OperatorHandle& op, const char* name) {
  const auto index = op.schema().argumentIndexWithName(name);
  TORCH_INTERNAL_ASSERT(index, op.schema(), " has no argument ", name);
  return static_cast<size_t>(*index);
}

SpecPtr spec_of(const Choice& choice, const Placements& placements) {
  return make_spec(choice.mesh->mesh, placements);
}

/// self.uniform_(…) and the like: the same call fills a whole tensor, of which self takes its part.
void fill(const c10::OperatorHandle& op, const Choice& choice,
          const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  auto local = stack[0].toTensor();
  auto whole = empty_global(input_sizes[0], choice.strides[0], local.options());
  auto& generator = stack[index_of(op, "generator")];
  std::optional<MeshGenerator> agreed;
  if (generator.isNone()) generator = agreed.emplace(*choice.mesh, local.device()).get();
  stack[0] = whole;
  op.callBoxed(stack);
  local.copy_(local_part_of(whole, *spec_of(choice, choice.inputs[0])));
  stack = {local};
}

const Registration kFill({"aten::uniform_", "aten::normal_", "aten::random_", "aten::random_.from",
                          "aten::random_.to", "aten::bernoulli_.float", "aten::exponential_",
                          "aten::log_normal_", "aten::geometric_", "aten::cauchy_"},
                         drawing(any_shard, fill));

using Draw = void (*)(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                      at::Tensor& whole, const at::Generator& generator);

at::TensorOptions options_like(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  auto options = stack[0].toTensor().options();
  const auto& dtype = stack[index_of(op, "dtype")];
  return dtype.isNone() ? options : options.dtype(dtype.toScalarType());
}

/// Laid out as on one device: like the argument, unless the call names a memory format.
at::Tensor whole_like(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                      const Sizes& sizes, const Sizes& strides) {
  const auto options = options_like(op, stack);
  const auto& format = stack[index_of(op, "memory_format")];
  if (format.isNone() || format.toMemoryFormat() == at::MemoryFormat::Preserve)
    return empty_global(sizes, strides, options);
  return at::empty(sizes, options.memory_format(format.toMemoryFormat()));
}

template <Draw draw>
void draw_like(const c10::OperatorHandle& op, const Choice& choice,
               const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const MeshGenerator generator(*choice.mesh, stack[0].toTensor().device());
  auto part = draw_part(*spec_of(choice, choice.outputs[0]),
                        whole_like(op, stack, input_sizes[0], choice.strides[0]),
                        [&](at::Tensor& whole) { draw(op, stack, whole, generator.get()); });
  stack = {std::move(part)};
}

void draw_uniform(const c10::OperatorHandle&, const torch::jit::Stack&, at::Tensor& whole,
                  const at::Generator& generator) {
  whole.uniform_(0, 1, generator);
}
void draw_normal(const c10::OperatorHandle&, const torch::jit::Stack&, at::Tensor& whole,
                 const at::Generator& generator) {
  whole.normal_(0, 1, generator);
}
void draw_integers(const c10::OperatorHandle& op, const torch::jit::Stack& stack, at::Tensor& whole,
                   const at::Generator& generator) {
  const auto low = op.schema().argumentIndexWithName("low");
  whole.random_(low ? stack[*low].toInt() : 0, stack[index_of(op, "high")].toInt(), generator);
}

const Registration kUniformLike({"aten::rand_like"},
                                drawing(any_placement, draw_like<draw_uniform>));
const Registration kNormalLike({"aten::randn_like"},
                               drawing(any_placement, draw_like<draw_normal>));
const Registration kIntegersLike({"aten::randint_like", "aten::randint_like.low_dtype"},
                                 drawing(any_placement, draw_like<draw_integers>));

/// A GPU's fused kernel sees the whole, in which this rank's part has values: what it draws depends
/// on their number, dtype and layout, and what it computes has the bits of one device.
void drop_in_whole(const c10::OperatorHandle& op, const Spec& spec, at::Tensor whole,
                   const MeshGenerator& generator, torch::jit::Stack& stack) {
  local_part_of(whole, spec).copy_(stack[0].toTensor());
  stack[0] = std::move(whole);
  generator.run_as_default([&] { op.callBoxed(stack); });
  for (auto& result : stack) result = local_part_of(result.toTensor(), spec).clone();
}

/// (input, p, train) -> (output, mask)
void drop(const c10::OperatorHandle& op, const Choice& choice,
          const std::vector<Sizes>& input_sizes, torch::jit::Stack& stack) {
  const auto input = stack[0].toTensor();
  const double p = stack[1].toDouble();
  const bool train = stack[2].isNone() || stack[2].toBool();
  if (!train) return op.callBoxed(stack);
  const auto spec = spec_of(choice, choice.inputs[0]);
  const MeshGenerator generator(*choice.mesh, input.device());
  const auto whole_of = [&](at::ScalarType dtype) {
    return empty_global(input_sizes[0], choice.strides[0], input.options().dtype(dtype));
  };
  if (input.is_cuda() && spec->is_replicated)
    return generator.run_as_default([&] { op.callBoxed(stack); });
  if (input.is_cuda())
    return drop_in_whole(op, *spec, whole_of(input.scalar_type()), generator, stack);
  const auto mask = draw_part(*spec, whole_of(at::kBool),
                              [&](at::Tensor& whole) { whole.bernoulli_(1 - p, generator.get()); });
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  stack = {input.mul(mask).mul_(scale), mask};
}

const Registration kDropout({"aten::native_dropout"}, drawing(any_shard, drop));

}  // namespace
}  // namespace tessera::dtensor
