#include <tessera/optim/muon.h>

#include "comm/type_names.h"
#include "dtensor/part.h"
#include "optim/adam.h"
#include "optim/arithmetic.h"
#include "optim/newton_schulz.h"
#include "optim/options.h"
#include "optim/rule.h"

#include <ATen/Tensor.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cmath>

namespace tessera::optim {
namespace {

constexpr size_t kMomentum = kExpAvgSqScale + 1;  // behind AdamW's state
constexpr unsigned kKept = 1U << kMomentum;

/// By how much a matrix's learning rate differs from its group's.
double lr_factor(const MuonOptions& options, const at::Tensor& param) {
  const auto rows = static_cast<double>(param.size(0));
  const auto columns = static_cast<double>(param.size(1));
  if (options.adjust_lr_fn.value_or("original") == "match_rms_adamw")
    return 0.2 * std::sqrt(std::max(rows, columns));
  return std::sqrt(std::max(1.0, rows / columns));
}

bool are_iterated_together(const at::Tensor& one, const at::Tensor& other) {
  if (one.sizes() != other.sizes() || dtensor::has_part(one) != dtensor::has_part(other))
    return false;
  return !dtensor::has_part(one) || dtensor::part_of(one).spec == dtensor::part_of(other).spec;
}

/// Positions of parameters of one shape and place, in the order of the first of each: the same on
/// all ranks.
std::vector<std::vector<size_t>> batches_of(const std::vector<at::Tensor>& params) {
  std::vector<std::vector<size_t>> batches;
  for (const auto i : c10::irange(params.size())) {
    const auto fits = [&](const std::vector<size_t>& batch) {
      return are_iterated_together(params[batch.front()], params[i]);
    };
    const auto found = std::ranges::find_if(batches, fits);
    if (found != batches.end()) {
      found->push_back(i);
    } else {
      batches.push_back({i});
    }
  }
  return batches;
}

/// Advances the momentum; what is to be made orthogonal, placed as the parameter.
at::Tensor direction(const at::Tensor& param, const at::Tensor& grad, at::Tensor& buffer,
                     const MuonOptions& options) {
  buffer.lerp_(grad, 1 - options.momentum);
  const at::Tensor update = options.nesterov ? at::lerp(grad, buffer, options.momentum) : buffer;
  if (!dtensor::has_part(param)) return update;
  return DTensor::of(update).redistribute(dtensor::part_of(param).spec->placements);
}

/// param = (1 - lr weight_decay) param - lr factor update
void descend(at::Tensor& param, const at::Tensor& update, const LearningRate& lr,
             const MuonOptions& options) {
  const at::Tensor step = update.to(param.scalar_type());
  const double factor = lr_factor(options, param);
  if (is_recorded()) {
    const at::Tensor& rate = lr.tensor(param.device(), at::kDouble);
    param.mul_(at::rsub(rate.mul(options.weight_decay), 1));
    add_scaled(param, step, rate.mul(factor), -1);
  } else {
    scale_by(param, 1 - lr.value() * options.weight_decay);
    param.add_(step, -lr.value() * factor);
  }
}

bool is_adamws(const torch::optim::OptimizerOptions& options) {
  return dynamic_cast<const GroupOptions<AdamWOptions>*>(&options) != nullptr;
}

/// Groups with AdamWOptions are AdamW's: what concerns them goes to its rule.
class MuonRule final : public Optimizer::Rule {
 public:
  MuonRule() : adamw_(make_adamw_rule()), names_(adamw_->state_names()) {
    names_.emplace_back("momentum_buffer");
    TORCH_INTERNAL_ASSERT(names_.size() == kMomentum + 1);
  }

  const char* name() const override { return "Muon"; }
  const std::vector<std::string>& state_names() const override { return names_; }

  Demand demand(Options& options) const override {
    if (is_adamws(options)) return adamw_->demand(options);
    options_as<MuonOptions>(options, name());
    return {.foreach = false, .fused = false, .kept = kKept};
  }

  bool may_have(const std::string& name, const Demand& demand) const override {
    return (name == names_[kMomentum]) == (demand.kept == kKept);
  }

  at::Tensor new_state(const std::string& name, const at::Tensor& parameter,
                       const Demand& demand) const override {
    if (!may_have(name, demand)) return {};
    return demand.kept == kKept ? at::zeros_like(parameter)
                                : adamw_->new_state(name, parameter, demand);
  }

  bool starts_with_state() const override { return true; }
  bool is_saved(const std::string& name, const at::Tensor& parameter) const override {
    return adamw_->is_saved(name, parameter);
  }
  State dense(const at::Tensor& parameter, const State& kept) const override {
    return adamw_->dense(parameter, kept);
  }
  void write(const std::string& name, const at::Tensor& parameter, const at::Tensor& value,
             State& into) const override {
    adamw_->write(name, parameter, value, into);
  }

  void check_parameter(Options& options, const at::Tensor& parameter, size_t index) const override {
    if (is_adamws(options)) return;
    TORCH_CHECK_VALUE(parameter.dim() == 2, "Muon: expected matrices, got parameter ", index,
                      " of its group with ", parameter.dim(), " dimensions, of shape ",
                      parameter.sizes(),
                      "; put biases, norms and the like into a group with AdamWOptions");
    TORCH_CHECK_TYPE(at::isFloatingType(parameter.scalar_type()),
                     "Muon: expected floating-point parameters, got parameter ", index,
                     " of its group, of ", comm::name_of_dtype(parameter.scalar_type()),
                     "; give it to another optimizer");
  }

  void check(const at::Tensor& parameter, bool sparse, Kernels kernels) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(!sparse,
                                "Muon does not support sparse gradients, got one for a parameter "
                                "of shape ",
                                parameter.sizes(),
                                "; give embeddings to another optimizer, or make the layer with "
                                "sparse(false)");
    adamw_->check(parameter, sparse, kernels);
  }

  uint64_t fingerprint(Options& options) const override {
    if (is_adamws(options)) return adamw_->fingerprint(options);
    const auto& values = options_as<MuonOptions>(options, name());
    const auto [a, b, c] = values.ns_coefficients;
    return fingerprint_of(values.weight_decay, values.momentum, values.nesterov, a, b, c,
                          values.eps, values.ns_steps,
                          values.adjust_lr_fn.value_or("original") == "original");
  }

  void update(ParamBucket& bucket, Options& options, const LearningRate& lr,
              const AmpScaling& scaling) const override {
    if (is_adamws(options)) return adamw_->update(bucket, options, lr, scaling);
    const auto& values = options_as<MuonOptions>(options, name());
    for (const auto& batch : batches_of(bucket.params)) {
      const bool is_wide = bucket.params[batch[0]].is_cpu() && !has_bfloat16_products();
      const NewtonSchulz iteration{values.ns_coefficients, values.ns_steps, values.eps, is_wide};
      std::vector<at::Tensor> updates;
      for (const size_t i : batch)
        updates.push_back(
            direction(bucket.params[i], bucket.grads[i], bucket.state[kMomentum][i], values));
      updates = dtensor::has_part(updates[0]) ? orthogonalized_in_shares(updates, iteration)
                                              : orthogonalized(updates, iteration);
      for (const auto k : c10::irange(batch.size()))
        descend(bucket.params[batch[k]], updates[k], lr, values);
    }
  }

 private:
  std::unique_ptr<Optimizer::Rule> adamw_;
  std::vector<std::string> names_;
};

}  // namespace

Muon::Muon(std::vector<at::Tensor> params, MuonOptions options)
    : Muon(std::vector<ParamGroup>{ParamGroup(std::move(params))}, std::move(options)) {}

Muon::Muon(const std::vector<ParamGroup>& groups, MuonOptions defaults)
    : Optimizer(groups, std::make_unique<MuonRule>(), checked_defaults(defaults)) {}

MuonOptions& Muon::options(size_t group) {
  return options_as<MuonOptions>(options_of(group), "Muon");
}

}  // namespace tessera::optim
