// Cross entropy on logits whose classes are sharded. See Note [sharded classes].

#include <tessera/dtensor.h>
#include <tessera/nn/linear_cross_entropy.h>
#include <tessera/parallelize.h>

#include "dtensor/collectives.h"
#include "dtensor/part.h"
#include "dtensor/scopes.h"
#include "dtensor/sharding.h"
#include "nn/linear_cross_entropy.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string>

namespace tessera::parallel {

/// The targets, if each is a class or `ignore_index`; an IndexError otherwise. On a GPU the check
/// is queued, and one that fails stops the device, as nll_loss does there: the host does not wait,
/// and meets the error at its next call. By operators, so that a compiled step checks at each run,
/// too.
at::Tensor checked_targets(const at::Tensor& targets, int64_t classes, int64_t ignore_index);

}  // namespace tessera::parallel

namespace tessera {
namespace parallel {
namespace {

// Note [sharded classes]
// A rank holds a chunk of the classes for all rows. log_softmax needs of the other ranks only the
// maximum and the sum of each row, its backward the sum of the gradient, the loss the one logit of
// the target, which a single rank has: small tensors that are reduced over the ranks. The rules
// below give the operators rows in which the class dimension is sharded, and run them so; in all
// other rows the operator itself runs.

using dtensor::Call;
using dtensor::Choice;
using dtensor::Row;
using dtensor::Rows;
using dtensor::Rule;
using dtensor::Sizes;
using torch::jit::Stack;

/// The classes that this rank holds, and over which ranks the others are.
class Classes {
 public:
  /// `input`: the tensor with the classes among the tensor arguments.
  Classes(const Choice& choice, const std::vector<Sizes>& input_sizes, size_t input, int64_t dim)
      : choice_(choice),
        placements_(choice.inputs[input]),
        dim(dim),
        count(input_sizes[input][dim]) {
    const auto chunk = dtensor::local_chunk(count, dim, placements_, choice.mesh->mesh_shape,
                                            choice.mesh->coordinate);
    offset = chunk.offset;
    length = chunk.length;
  }

  bool is_sharded() const {
    return std::any_of(placements_.begin(), placements_.end(),
                       [&](const auto& placement) { return placement.is_shard(dim); });
  }
  at::Tensor reduce(at::Tensor tensor, ReduceOp::RedOpType op) const {
    for (size_t mesh_dim = 0; mesh_dim < placements_.size(); ++mesh_dim) {
      if (placements_[mesh_dim].is_shard(dim) && choice_.mesh->mesh_shape[mesh_dim] > 1)
        tensor = dtensor::reduce_all(tensor, op, choice_.mesh->groups[mesh_dim]).wait();
    }
    return tensor;
  }

 private:
  const Choice& choice_;
  const Placements& placements_;

 public:
  const int64_t dim;
  const int64_t count;
  int64_t offset;
  int64_t length;
};

/// Half precision is accumulated in single, as in the operators themselves.
at::Tensor accumulable(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}

int64_t wrapped(int64_t dim, int64_t ndim) { return dim < 0 ? dim + ndim : dim; }

/// Sizes with 1 in the place of the classes.
Sizes one_per_row(const at::Tensor& tensor, int64_t dim) {
  auto sizes = tensor.sizes().vec();
  sizes[dim] = 1;
  return sizes;
}

void run_log_softmax(const c10::OperatorHandle& op, const Choice& choice,
                     const std::vector<Sizes>& input_sizes, Stack& stack) {
  const auto logits = stack[0].toTensor();
  const Classes classes(choice, input_sizes, 0, wrapped(stack[1].toInt(), logits.dim()));
  if (!classes.is_sharded()) return op.callBoxed(stack);
  const auto dtype = stack[2].toBool() ? at::kFloat : logits.scalar_type();
  const auto x = accumulable(logits);
  const auto own = classes.length > 0
                       ? x.amax(classes.dim, /*keepdim=*/true)
                       : at::full(one_per_row(x, classes.dim),
                                  -std::numeric_limits<double>::infinity(), x.options());
  const auto shifted = x - classes.reduce(own, ReduceOp::MAX);
  const auto sums = classes.reduce(shifted.exp().sum(classes.dim, /*keepdim=*/true), ReduceOp::SUM);
  stack.clear();
  stack.emplace_back((shifted - sums.log()).to(dtype));
}

void run_log_softmax_backward(const c10::OperatorHandle& op, const Choice& choice,
                              const std::vector<Sizes>& input_sizes, Stack& stack) {
  const auto output = stack[1].toTensor();
  const Classes classes(choice, input_sizes, 1, wrapped(stack[2].toInt(), output.dim()));
  if (!classes.is_sharded()) return op.callBoxed(stack);
  const auto gradient = accumulable(stack[0].toTensor());
  const auto dtype = stack[3].toScalarType();
  const auto sums = classes.reduce(gradient.sum(classes.dim, /*keepdim=*/true), ReduceOp::SUM);
  stack.clear();
  stack.emplace_back((gradient - accumulable(output).exp() * sums).to(dtype));
}

int64_t class_dim(int64_t ndim) { return ndim == 1 ? 0 : 1; }

at::Tensor are_classes(const at::Tensor& targets, int64_t classes, int64_t ignore_index) {
  return (((targets >= 0) & (targets < classes)) | (targets == ignore_index)).all();
}

std::string wrong_target(int64_t classes) {
  return c10::str("cross_entropy: expected targets from 0 to ", classes - 1,
                  ", or ignore_index, got one that is out of bounds");
}

at::Tensor check_on_cpu(const at::Tensor& targets, int64_t classes, int64_t ignore_index) {
  TORCH_CHECK_INDEX(are_classes(targets, classes, ignore_index).item<bool>(),
                    wrong_target(classes));
  return targets.clone();
}

/// For every row: where its target is in this rank's chunk, and its weight.
struct Targets {
  at::Tensor place;   // with a class dimension of 1; 0 where it is not here
  at::Tensor is_own;  // the target is here and counts
  at::Tensor weight;  // 0 where the target is ignored

  Targets(const Classes& classes, const at::Tensor& target, const c10::IValue& weights,
          int64_t ignore_index, const at::TensorOptions& options) {
    const auto spread = target.unsqueeze(target.dim() == 0 ? 0 : classes.dim);
    const auto counts = spread != ignore_index;
    const auto valid = at::where(counts, spread, 0);
    is_own = counts & (valid >= classes.offset) & (valid < classes.offset + classes.length);
    place = at::where(is_own, valid - classes.offset, 0);
    // An optional tensor left out arrives as none in forward, undefined in backward.
    const bool is_weighted = weights.isTensor() && weights.toTensor().defined();
    weight = is_weighted ? at::where(counts, weights.toTensor().to(options).take(valid), 0.0)
                         : counts.to(options);
  }
};

void run_nll_loss(const c10::OperatorHandle& op, const Choice& choice,
                  const std::vector<Sizes>& input_sizes, Stack& stack) {
  const auto self = stack[0].toTensor();
  const Classes classes(choice, input_sizes, 0, class_dim(self.dim()));
  if (!classes.is_sharded()) return op.callBoxed(stack);
  const auto x = accumulable(self);
  const auto ignore_index = stack[4].toInt();
  // The operator checks while it looks up, which here would be one rank alone.
  const Targets targets(classes, checked_targets(stack[1].toTensor(), classes.count, ignore_index),
                        stack[2], ignore_index, x.options());
  const auto reduction = stack[3].toInt();
  auto loss = classes.length > 0
                  ? at::where(targets.is_own, -x.gather(classes.dim, targets.place), 0.0)
                  : at::zeros(one_per_row(x, classes.dim), x.options());
  loss = (loss * targets.weight).squeeze(classes.dim);
  auto total = targets.weight.sum();
  if (reduction != at::Reduction::None) loss = loss.sum();
  loss = classes.reduce(loss, ReduceOp::SUM);
  if (reduction == at::Reduction::Mean) loss = loss / total;
  if (reduction == at::Reduction::None) total = at::zeros({}, x.options());
  stack.clear();
  stack.emplace_back(loss.to(self.scalar_type()));
  stack.emplace_back(total.to(self.scalar_type()));
}

void run_nll_loss_backward(const c10::OperatorHandle& op, const Choice& choice,
                           const std::vector<Sizes>& input_sizes, Stack& stack) {
  const auto self = stack[1].toTensor();
  const Classes classes(choice, input_sizes, 1, class_dim(self.dim()));
  if (!classes.is_sharded()) return op.callBoxed(stack);
  const auto x = accumulable(self);
  const Targets targets(classes, stack[2].toTensor(), stack[3], stack[5].toInt(), x.options());
  const auto reduction = stack[4].toInt();
  auto gradient = accumulable(stack[0].toTensor());
  if (reduction == at::Reduction::None)
    gradient = gradient.unsqueeze(classes.dim);
  else if (reduction == at::Reduction::Mean)
    gradient = gradient / accumulable(stack[6].toTensor());
  auto result = at::zeros(x.sizes(), x.options());
  if (classes.length > 0)
    result.scatter_(classes.dim, targets.place,
                    at::where(targets.is_own, -gradient * targets.weight, 0.0));
  stack.clear();
  stack.emplace_back(result.to(self.scalar_type()));
}

/// Every dimension may be sharded: rows that are not that of the classes run the operator itself.
Rows log_softmax_rows(const Call& call, int64_t /*ranks*/) {
  Rows rows;
  for (int64_t dim = 0; dim < call.operand(0).ndim(); ++dim)
    rows.emplace_back(std::vector<Placement>(1 + call.input_count(), Shard(dim)));
  return rows;
}

/// loss and total weight, then logits, target, weights.
Rows nll_loss_rows(const Call& call, int64_t /*ranks*/) {
  auto row = call.row();
  row[call.output_count()] = Shard(class_dim(call.operand(0).ndim()));
  return {Row(std::move(row))};
}

/// gradient of the logits, then that of the loss, logits, target, weights, total weight.
Rows nll_loss_backward_rows(const Call& call, int64_t /*ranks*/) {
  auto row = call.row();
  const auto classes = Shard(class_dim(call.operand(1).ndim()));
  row[0] = classes;
  row[call.output_count() + 1] = classes;
  return {Row(std::move(row))};
}

Rule rule_of(Rows (*rows)(const Call&, int64_t), dtensor::RunLocal run) {
  Rule rule;
  rule.rows = rows;
  rule.takes_empty_shards = true;
  rule.run = std::move(run);
  rule.takes_plain = true;
  return rule;
}

const dtensor::RuleTable& loss_rules() {
  static const auto& rules = *new dtensor::RuleTable([] {
    auto nll = rule_of(nll_loss_rows, run_nll_loss);
    auto nll_backward = rule_of(nll_loss_backward_rows, run_nll_loss_backward);
    dtensor::RuleTable table = {
        {"aten::_log_softmax", rule_of(log_softmax_rows, run_log_softmax)},
        {"aten::_log_softmax_backward_data", rule_of(log_softmax_rows, run_log_softmax_backward)},
        {"aten::nll_loss_forward", nll},
        {"aten::nll_loss_backward", nll_backward}};
    // The forms for images have no Meta kernels.
    nll.shapes = [](const Call& call) -> std::vector<Sizes> {
      const bool is_reduced = call.argument("reduction").toInt() != at::Reduction::None;
      return {is_reduced ? Sizes() : call.operand(1).sizes, Sizes()};
    };
    nll_backward.shapes = [](const Call& call) -> std::vector<Sizes> {
      return {call.operand(1).sizes};
    };
    table.emplace("aten::nll_loss2d_forward", nll);
    table.emplace("aten::nll_loss2d_backward", nll_backward);
    return table;
  }());
  return rules;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("checked_targets(Tensor targets, int classes, int ignore_index) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CPU, library) { library.impl("checked_targets", &check_on_cpu); }

at::Tensor checked_targets(const at::Tensor& targets, int64_t classes, int64_t ignore_index) {
  if (!targets.is_cpu()) {
    at::_assert_async(are_classes(targets, classes, ignore_index), wrong_target(classes));
    return targets;
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::checked_targets", "")
                             .typed<decltype(check_on_cpu)>();
  return op.call(targets, classes, ignore_index);
}

}  // namespace parallel

loss_parallel::loss_parallel()
    : scope_(dtensor::open_scope([](auto& scopes) { scopes.rules = &parallel::loss_rules(); })) {}
loss_parallel::~loss_parallel() = default;

}  // namespace tessera

namespace tessera::parallel {

// linear_cross_entropy of a head whose classes are sharded over the ranks of a mesh.

namespace {

constexpr const char* kRemedy =
    "; for others use cross_entropy under loss_parallel, for a replicated one its to_local()";

/// The classes of all ranks but the last.
int64_t most_classes(const DTensor& head) {
  return dtensor::chunk_of(head.size(0), head.mesh().size(), 0).length;
}

void check_head(const at::Tensor& weight, const at::Tensor& bias) {
  TORCH_CHECK_TYPE(is_dtensor(weight) && (!bias.defined() || is_dtensor(bias)),
                   "linear_cross_entropy: expected the weight, and its bias, to be DTensors like "
                   "the rest, got plain ones; for those pass to_local() of input and target");
  const auto head = DTensor::of(weight);
  TORCH_CHECK_NOT_IMPLEMENTED(
      head.mesh().ndim() == 1 && head.placements() == Placements{Shard(0)} &&
          dtensor::packed_parts(weight) == 1,
      "linear_cross_entropy: expected a weight whose classes are sharded over a 1-D mesh, "
      "Shard(0), with rows in their own order, got ",
      c10::str(head.placements()), " on ", head.mesh(), kRemedy);
  if (bias.defined()) {
    const auto placed = DTensor::of(bias);
    TORCH_CHECK_VALUE(placed.mesh() == head.mesh() && placed.placements() == head.placements(),
                      "linear_cross_entropy: expected a bias placed as the weight, Shard(0), got ",
                      c10::str(placed.placements()), " on ", placed.mesh());
  }
  const auto ranks = head.mesh().size(), classes = weight.size(0);
  TORCH_CHECK_VALUE(most_classes(head) * (ranks - 1) < classes,
                    "linear_cross_entropy: expected at least one class on each rank, got ", classes,
                    " on ", ranks, " ranks", kRemedy);
}

DTensor replicated(const at::Tensor& tensor, const DeviceMesh& mesh) {
  if (!is_dtensor(tensor)) return DTensor::from_local(tensor, mesh);
  const auto placed = DTensor::of(tensor);
  TORCH_CHECK_VALUE(placed.mesh() == mesh, "linear_cross_entropy: expected tensors on ", mesh,
                    ", that of the weight, got one on ", placed.mesh());
  return placed.redistribute({Replicate()});
}

at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                                const at::Tensor& target,
                                const nn::LinearCrossEntropyOptions& options) {
  check_head(weight, options.bias);
  const auto head = DTensor::of(weight);
  const auto& mesh = head.mesh();
  auto local = options;
  if (local.bias.defined()) local.bias = DTensor::of(local.bias).to_local();
  auto targets = replicated(target, mesh).to_local();
  // One rank alone finds a target's logit, so none of the others would see a wrong one.
  if (targets.scalar_type() == at::kLong)  // others are refused below
    targets = checked_targets(targets, weight.size(0), options.ignore_index);
  const auto reduce = [group = mesh.group()](ReduceOp::RedOpType op) {
    return [group, op](const at::Tensor& tensor) {
      return dtensor::reduce_all(tensor, op, group).wait();
    };
  };
  const auto chunk =
      dtensor::local_chunk(weight.size(0), 0, head.placements(), mesh.shape(), *mesh.coordinate());
  return nn::detail::linear_cross_entropy_of_shard(
      replicated(input, mesh).to_local(Placements{Partial()}), head.to_local(), targets, local,
      {.first = chunk.offset,
       .most = most_classes(head),
       .largest = reduce(ReduceOp::MAX),
       .sum = reduce(ReduceOp::SUM)});
}

[[maybe_unused]] const bool kIsSet = [] {
  nn::detail::set_distributed_linear_cross_entropy(&linear_cross_entropy);
  return true;
}();

}  // namespace
}  // namespace tessera::parallel
