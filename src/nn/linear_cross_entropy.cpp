// Cross entropy of a linear head by blocks of rows. See Note [head in blocks].
#include "nn/linear_cross_entropy.h"

#include <tessera/nn/linear_cross_entropy.h>

#include "base/capture.h"
#include "nn/row_kernels.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace tessera::nn {
namespace {

// Note [head in blocks]
// The gradient of the logits is (softmax - one_hot) times a number per row, so a block of rows has
// all it needs when its logits are there, but for the gradient of the loss. Of a sum or a mean that
// is one number for all rows: forward leaves it out, makes the gradients of input, weight and bias
// of the block at once, and backward multiplies them. The mean's 1 / count is left out as well: in
// fp16 gradients that small would vanish, and backward's number has the loss scale in it.
// Reduction::None has a number per row, which the sum over rows in the weight's gradient needs
// first: its backward goes through the blocks a second time.
// A compiled step for a GPU is given cross_entropy's own operators for a block: one kernel reads
// the logits and writes their gradient, so the rows' exponentials are never in memory. Where the
// classes are sharded over ranks, the maximum of each row, then its sum and the logit of its
// target, which one rank has, are reduced over them; all else is the same on a rank's classes.

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kName = "linear_cross_entropy";
// DTensor's, which is above this folder.
constexpr auto kDistributed = c10::DispatchKey::PrivateUse3;

bool is_low_precision(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }
at::ScalarType accumulable(at::ScalarType dtype) {
  return is_low_precision(dtype) ? at::kFloat : dtype;
}

/// What is computed, but for its tensors.
struct Plan : torch::CustomClassHolder {
  at::ScalarType dtype;  // of the products
  int64_t ignore_index;
  int64_t reduction;
  int64_t chunk_rows;
  std::optional<detail::ClassShard> shard;
};
using PlanPtr = c10::intrusive_ptr<Plan>;

/// Which gradients are asked for, and what they are.
struct Gradients {
  bool of_input = false, of_weight = false, of_bias = false;
  at::Tensor input = {}, weight = {}, bias = {};

  bool any() const { return of_input || of_weight || of_bias; }
};

/// sum += gradient.t() @ rows
void add_product(at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& rows) {
  if (sum.scalar_type() == rows.scalar_type())
    sum.addmm_(gradient.t(), rows);
  else if (sum.is_cuda())
    at::addmm_out(sum, sum, gradient.t(), rows, sum.scalar_type());
  else
    sum.addmm_(gradient.t().to(sum.scalar_type()), rows.to(sum.scalar_type()));
}

class Blocks {
 public:
  Blocks(PlanPtr plan, const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias,
         const at::Tensor& target)
      : plan_(std::move(plan)),
        rows_(rows),
        weight_(weight.to(plan_->dtype)),
        bias_(bias.defined() ? bias.to(plan_->dtype) : at::Tensor()),
        target_(target),
        counts_(target != plan_->ignore_index) {}

  const at::Tensor& counts() const { return counts_; }

  /// The loss of each row, and the gradients that are asked for, of the sum of the losses times
  /// `scale`: a number per row, undefined for 1.
  at::Tensor run(Gradients& gradients, const at::Tensor& scale = {}) const {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto dtype = accumulable(plan_->dtype);
    const auto options = rows_.options().dtype(dtype);
    auto factors = counts_.to(dtype);
    if (scale.defined()) factors = factors * scale;
    if (gradients.of_weight) gradients.weight = at::zeros(weight_.sizes(), options);
    if (gradients.of_bias) gradients.bias = at::zeros(bias_.sizes(), options);

    std::vector<at::Tensor> losses, inputs;
    const auto count = rows_.size(0);
    for (int64_t first = 0; first < count; first += plan_->chunk_rows) {
      const auto length = std::min(plan_->chunk_rows, count - first);
      losses.push_back(run_block(first, length, factors, gradients));
      if (gradients.of_input) inputs.push_back(std::move(gradients.input));
    }
    if (gradients.of_input) gradients.input = joined(inputs, rows_);
    return joined(losses, factors);
  }

 private:
  /// The blocks one after the other; `empty` if there are none.
  static at::Tensor joined(const std::vector<at::Tensor>& blocks, const at::Tensor& empty) {
    if (blocks.empty()) return empty.clone();
    return blocks.size() == 1 ? blocks.front() : at::cat(blocks);
  }

  /// Values of each row that go into its loss: [rows, 1].
  struct Parts {
    at::Tensor sum;     // of the exponentials of all classes
    at::Tensor missed;  // minus the target's logit, which is relative to the largest; 0: ignored
    at::Tensor place;   // of the target among this rank's classes
    at::Tensor is_own;  // the target is there and counts
  };

  at::Tensor run_block(int64_t first, int64_t length, const at::Tensor& factors,
                       Gradients& gradients) const {
    const auto rows = rows_.narrow(0, first, length);
    const auto target = target_.narrow(0, first, length).unsqueeze(1);
    const auto counts = counts_.narrow(0, first, length).unsqueeze(1);

    auto logits = at::linear(rows, weight_, bias_);  // [rows, classes]
    if (is_compiled(logits)) return run_as_operators(logits, first, length, factors, gradients);
    if (auto found = run_as_rows(logits, first, length, factors, gradients)) {
      add_gradients(found->at(1), rows, gradients);
      return found->at(0).squeeze(1);
    }
    auto largest = logits.amax(1, /*keepdim=*/true).to(factors.scalar_type());
    if (plan_->shard) largest = plan_->shard->largest(largest);
    auto values = is_low_precision(plan_->dtype) ? logits - largest : logits.sub_(largest);
    const auto parts =
        plan_->shard ? shard_parts(values, target, counts) : all_parts(values, target, counts);
    const auto losses = (at::where(counts, parts.sum.log(), 0.0) + parts.missed).squeeze(1);
    if (!gradients.any()) return losses;

    values.scatter_add_(1, parts.place, at::where(parts.is_own, -parts.sum, 0.0));
    const auto scales = factors.narrow(0, first, length).unsqueeze(1) / parts.sum;
    // In the memory of the logits.
    at::mul_out(logits, values, scales);
    add_gradients(logits, rows, gradients);
    return losses;
  }

  /// Whether somebody records, whose kernels for a GPU go over rows.
  bool is_compiled(const at::Tensor& logits) const {
    return capture::observer() != nullptr && logits.is_cuda() && !plan_->shard;
  }

  /// By the operators of cross_entropy and of its backward, of which the compiler makes one kernel.
  at::Tensor run_as_operators(const at::Tensor& logits, int64_t first, int64_t length,
                              const at::Tensor& factors, Gradients& gradients) const {
    const auto target = target_.narrow(0, first, length);
    const auto dtype = factors.scalar_type();
    constexpr auto kNone = at::Reduction::None;
    auto log_probabilities = at::_log_softmax(logits.to(dtype), 1, /*half_to_float=*/false);
    const auto [losses, total] =
        at::nll_loss_forward(log_probabilities, target, {}, kNone, plan_->ignore_index);
    if (!gradients.any()) return losses;
    const auto scale = factors.narrow(0, first, length);
    auto gradient = at::nll_loss_backward(scale, log_probabilities, target, {}, kNone,
                                          plan_->ignore_index, total);
    gradient = at::_log_softmax_backward_data(gradient, log_probabilities, 1, dtype);
    log_probabilities.reset();  // while it is recorded, this runs, too
    gradient = gradient.to(plan_->dtype);
    add_gradients(gradient, rows_.narrow(0, first, length), gradients);
    return losses;
  }

  /// Losses and the gradient of the logits by one kernel; none if there is no such kernel.
  std::optional<std::vector<at::Tensor>> run_as_rows(const at::Tensor& logits, int64_t first,
                                                     int64_t length, const at::Tensor& factors,
                                                     const Gradients& gradients) const {
    constexpr int64_t kMany = int64_t{1} << 20;  // ATen's are written already
    if (!gradients.any() || plan_->shard || logits.numel() < kMany ||
        logits.scalar_type() == at::kDouble || !detail::has_row_kernels(logits))
      return std::nullopt;
    const auto target = target_.narrow(0, first, length);
    auto found = detail::run_rows(
        {.name = detail::kCrossEntropyRows,
         .arguments = {logits, target, factors.narrow(0, first, length), plan_->ignore_index},
         .results = {{factors.scalar_type(), {length, 1}},
                     {logits.scalar_type(), logits.sizes().vec()}}});
    if (!found) return std::nullopt;
    // Stops the GPU, as ATen's kernel does.
    const auto is_fine = (target >= 0)
                             .logical_and(target < logits.size(1))
                             .logical_or(target == plan_->ignore_index);
    at::_assert_async(is_fine.all(),
                      c10::str(kName, ": expected targets of at least 0 and less than ",
                               logits.size(1), ", the number of classes, or ignore_index"));
    return found;
  }

  /// Leaves exponentials in `values`.
  Parts all_parts(at::Tensor& values, const at::Tensor& target, const at::Tensor& counts) const {
    // Checks the targets, too, as cross_entropy does: on the CPU by an error, on a GPU there.
    const auto missed =
        at::nll_loss(values, target.squeeze(1), {}, at::Reduction::None, plan_->ignore_index);
    values.exp_();
    return {.sum = values.sum(1, /*keepdim=*/true),
            .missed = missed.unsqueeze(1),
            .place = at::where(counts, target, 0),
            .is_own = counts};
  }
  Parts shard_parts(at::Tensor& values, const at::Tensor& target, const at::Tensor& counts) const {
    const auto local = target - plan_->shard->first;
    const auto is_own = counts & (local >= 0) & (local < values.size(1));
    const auto place = at::where(is_own, local, 0);
    const auto missed = at::where(is_own, -values.gather(1, place), 0.0);
    values.exp_();
    const auto both = plan_->shard->sum(at::stack({values.sum(1, /*keepdim=*/true), missed}));
    return {.sum = both[0], .missed = both[1], .place = place, .is_own = is_own};
  }

  void add_gradients(const at::Tensor& gradient, const at::Tensor& rows,
                     Gradients& gradients) const {
    if (gradients.of_input) gradients.input = at::mm(gradient, weight_);
    if (gradients.of_weight) add_product(gradients.weight, gradient, rows);
    if (gradients.of_bias)
      gradients.bias.add_(gradient.sum({0}, /*keepdim=*/false, gradients.bias.scalar_type()));
  }

  PlanPtr plan_;
  at::Tensor rows_, weight_, bias_, target_;
  at::Tensor counts_;  // which targets are not ignored
};

void check_once_differentiable() {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), kName,
                              ": expected a backward without create_graph, since it can't be "
                              "differentiated twice; for that, use cross_entropy of linear");
}

/// Sum or mean.
class ReducedLoss : public torch::autograd::Function<ReducedLoss> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const at::Tensor& target, const PlanPtr& plan, Gradients gradients) {
    const Blocks blocks(plan, rows, weight, bias.value_or(at::Tensor()), target);
    const auto loss = blocks.run(gradients).sum();
    const auto count = blocks.counts().sum();
    // Autograd brings what backward returns to the parameter's dtype. Before it is multiplied, a
    // gradient may be beyond fp16.
    if (gradients.of_weight && weight.scalar_type() == at::kBFloat16)
      gradients.weight = gradients.weight.to(at::kBFloat16);
    const bool is_mean = plan->reduction == at::Reduction::Mean;
    context->saved_data["is_mean"] = is_mean;
    context->save_for_backward({gradients.input, gradients.weight, gradients.bias, count});
    return is_mean ? loss / count : loss;
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    check_once_differentiable();
    const auto saved = context->get_saved_variables();
    auto factor = upstream[0];
    // No target counts: the loss is NaN and the gradients are zeros, as cross_entropy's.
    if (context->saved_data["is_mean"].toBool())
      factor = at::where(saved[3] > 0, factor / saved[3], 0.0);
    variable_list results(6);
    for (size_t i = 0; i < 3; ++i)
      if (saved[i].defined()) results[i] = saved[i] * factor;
    return results;
  }
};

/// Reduction::None.
class LossPerRow : public torch::autograd::Function<LossPerRow> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const at::Tensor& target, const PlanPtr& plan,
                            const Gradients& gradients) {
    context->save_for_backward({rows, weight, bias.value_or(at::Tensor()), target});
    context->saved_data["plan"] = c10::IValue::make_capsule(plan);
    context->saved_data["gradients"] =
        std::vector<bool>{gradients.of_input, gradients.of_weight, gradients.of_bias};
    Gradients none;
    return Blocks(plan, rows, weight, bias.value_or(at::Tensor()), target).run(none);
  }

  static variable_list backward(AutogradContext* context, const variable_list& upstream) {
    check_once_differentiable();
    const auto saved = context->get_saved_variables();
    const auto plan =
        c10::static_intrusive_pointer_cast<Plan>(context->saved_data["plan"].toCapsule());
    const auto asked = context->saved_data["gradients"].toBoolList();
    Gradients gradients{.of_input = asked[0], .of_weight = asked[1], .of_bias = asked[2]};
    const Blocks blocks(plan, saved[0], saved[1], saved[2], saved[3]);
    blocks.run(gradients, upstream[0]);
    return {gradients.input, gradients.weight, gradients.bias, {}, {}, {}};
  }
};

/// Autocast casts what is not float64.
bool is_autocast(const at::Tensor& input, const at::Tensor& weight) {
  return input.scalar_type() != at::kDouble && weight.scalar_type() != at::kDouble &&
         at::autocast::is_autocast_enabled(input.device().type());
}

void check_arguments(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
                     const LinearCrossEntropyOptions& options) {
  TORCH_CHECK_TYPE(input.is_floating_point(), kName, ": expected a floating point input, got ",
                   input.scalar_type());
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, kName,
                   ": expected indices of classes (int64) as target, got ", target.scalar_type(),
                   "; for probabilities use cross_entropy of linear");
  TORCH_CHECK_TYPE(input.scalar_type() == weight.scalar_type() || is_autocast(input, weight), kName,
                   ": expected input and weight of one dtype, got ", input.scalar_type(), " and ",
                   weight.scalar_type(), "; cast one of them, or use Autocast");
  TORCH_CHECK_VALUE(input.dim() >= 1 && weight.dim() == 2 && weight.size(1) == input.size(-1) &&
                        weight.size(0) > 0,
                    kName, ": expected an input of [..., features] and a weight of [classes, ",
                    "features], got ", input.sizes(), " and ", weight.sizes());
  TORCH_CHECK_VALUE(target.sizes() == input.sizes().slice(0, input.dim() - 1), kName,
                    ": expected a target for each row of the input, got sizes ", target.sizes(),
                    " for an input of ", input.sizes());
  TORCH_CHECK_VALUE(!options.bias.defined() || options.bias.sizes() == weight.sizes().slice(0, 1),
                    kName, ": expected a bias of [", weight.size(0), "], got ",
                    options.bias.defined() ? options.bias.sizes() : at::IntArrayRef());
  TORCH_CHECK_VALUE(options.chunk_rows.value_or(1) >= 1, kName,
                    ": expected chunk_rows of at least 1, got ", options.chunk_rows.value_or(1),
                    "; leave it out for a good one");
}

/// Few enough that their logits are small beside all, many enough for the products to be fast.
int64_t rows_of_block(int64_t rows, int64_t classes) {
  constexpr int64_t kBlocks = 8, kElements = int64_t{1} << 24;
  return std::max({(rows + kBlocks - 1) / kBlocks, kElements / classes, int64_t{1}});
}

at::Tensor compute(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& target,
                   const LinearCrossEntropyOptions& options,
                   std::optional<detail::ClassShard> shard) {
  check_arguments(input, weight, target, options);
  const auto& bias = options.bias;
  const auto dtype = is_autocast(input, weight)
                         ? at::autocast::get_autocast_dtype(input.device().type())
                         : input.scalar_type();
  const auto rows = input.to(dtype).reshape({target.numel(), input.size(-1)});
  const auto plan = c10::make_intrusive<Plan>();
  plan->dtype = dtype;
  plan->ignore_index = options.ignore_index;
  plan->reduction = options.reduction;
  plan->chunk_rows = options.chunk_rows.value_or(
      rows_of_block(rows.size(0), shard ? shard->most : weight.size(0)));
  plan->shard = std::move(shard);

  const bool is_recorded = at::GradMode::is_enabled();
  const Gradients gradients{.of_input = is_recorded && rows.requires_grad(),
                            .of_weight = is_recorded && weight.requires_grad(),
                            .of_bias = is_recorded && bias.defined() && bias.requires_grad()};
  const auto given_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  const auto targets = target.reshape({-1});
  if (options.reduction == at::Reduction::None) {
    return LossPerRow::apply(rows, weight, given_bias, targets, plan, gradients)
        .reshape(target.sizes());
  }
  return ReducedLoss::apply(rows, weight, given_bias, targets, plan, gradients);
}

/// What detail::kCrossEntropyRows means; the kernel is the compiler's.
std::tuple<at::Tensor, at::Tensor> cross_entropy_rows(const at::Tensor& logits,
                                                      const at::Tensor& target,
                                                      const at::Tensor& scale,
                                                      int64_t ignore_index) {
  const auto log_probabilities = at::_log_softmax(logits.to(scale.scalar_type()), 1, false);
  const auto counted = target != ignore_index;
  const auto place = at::where(counted, target, 0).unsqueeze(1);
  const auto factor = at::where(counted, scale, 0.0).unsqueeze(1);
  const auto losses = at::where(counted.unsqueeze(1), -log_probabilities.gather(1, place), 0.0);
  const auto gradient = (log_probabilities.exp() * factor).scatter_add(1, place, -factor);
  return {losses, gradient.to(logits.scalar_type())};
}

constinit decltype(&linear_cross_entropy) distributed = nullptr;

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& input, const at::Tensor& weight,
                                const at::Tensor& target,
                                const LinearCrossEntropyOptions& options) {
  for (const auto* tensor : {&input, &weight, &target, &options.bias})
    if (tensor->defined() && tensor->key_set().has(kDistributed))
      return distributed(input, weight, target, options);
  try {
    return compute(input, weight, target, options, std::nullopt);
  } catch (const c10::IndexError& error) {  // the operator that looks a target up finds it wrong
    TORCH_CHECK_INDEX(false, kName, ": expected targets from 0 to ", weight.size(0) - 1,
                      ", or ignore_index, got another: ", error.what_without_backtrace());
  }
}

at::Tensor detail::linear_cross_entropy_of_shard(const at::Tensor& input, const at::Tensor& weight,
                                                 const at::Tensor& target,
                                                 const LinearCrossEntropyOptions& options,
                                                 ClassShard shard) {
  return compute(input, weight, target, options, std::move(shard));
}

void detail::set_distributed_linear_cross_entropy(decltype(&linear_cross_entropy) function) {
  distributed = function;
}

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def(
      "cross_entropy_rows(Tensor logits, Tensor target, Tensor scale, int ignore_index) -> "
      "(Tensor, Tensor)",
      &cross_entropy_rows);
}

}  // namespace tessera::nn
