#include "optim/adam_kernels.h"
#include "optim/options.h"

#include <ATen/Context.h>
#include <ATen/Tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DefaultDtype.h>

namespace tessera::optim {

namespace {

constexpr bool is_decoupled(const AdamOptions& options) { return options.decoupled_weight_decay; }
constexpr bool is_decoupled(const AdamWOptions&) { return true; }

template <class Values>
class AdamRule final : public Optimizer::Rule {
 public:
  explicit AdamRule(const char* name) : name_(name) {}

  const char* name() const override { return name_; }

  const std::vector<std::string>& state_names() const override {
    static const std::vector<std::string> kNames = {"step", "exp_avg", "exp_avg_sq",
                                                    "max_exp_avg_sq"};
    return kNames;
  }

  Demand demand(Options& options) const override {
    const auto& values = options_as<Values>(options, name_);
    constexpr unsigned kAlways = 1U << kStep | 1U << kExpAvg | 1U << kExpAvgSq;
    return {values.foreach, values.fused, kAlways | (values.amsgrad ? 1U << kMaxExpAvgSq : 0U)};
  }

  /// Steps are counted on the host, where reading them is free, except for fused kernels.
  at::Tensor new_state(const std::string& name, const at::Tensor& parameter,
                       bool fused) const override {
    if (name != "step") return at::zeros_like(parameter);
    if (fused) return at::zeros({}, at::dtype(at::kFloat).device(parameter.device()));
    const bool wide = c10::get_default_dtype_as_scalartype() == at::kDouble;
    return at::zeros({}, wide ? at::kDouble : at::kFloat);
  }

  bool starts_with_state() const override { return true; }

  void check(const at::Tensor& parameter, bool sparse, Kernels kernels) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(!sparse, name_,
                                " does not support sparse gradients, got one for a parameter of "
                                "shape ",
                                parameter.sizes(),
                                "; give the parameter to tessera::optim::SGD, or make the layer "
                                "with sparse(false)");
    if (kernels == Kernels::Fused) check_fused(name_, parameter, sparse);
  }

  uint64_t fingerprint(Options& options) const override {
    const auto& values = options_as<Values>(options, name_);
    return fingerprint_of(values.betas.first, values.betas.second, values.eps, values.weight_decay,
                          values.amsgrad, values.maximize, is_decoupled(values),
                          values.foreach.value_or(false), values.fused.value_or(false));
  }

  void update(Bucket& bucket, Options& options, const LearningRate& lr,
              const AmpScaling& scaling) const override {
    const auto& values = options_as<Values>(options, name_);
    const AdamStep step{.lr = lr,
                        .beta1 = values.betas.first,
                        .beta2 = values.betas.second,
                        .eps = values.eps,
                        .weight_decay = values.weight_decay,
                        .amsgrad = values.amsgrad,
                        .maximize = values.maximize,
                        .decoupled_weight_decay = is_decoupled(values)};
    switch (bucket.kernels) {
      case Kernels::Loop:
        return adam_in_loop(bucket, step);
      case Kernels::Foreach:
        return adam_with_lists(bucket, step);
      case Kernels::Fused:
        return adam_fused(bucket, step, scaling);
    }
  }

 private:
  const char* name_;
};

template <class Values>
std::unique_ptr<torch::optim::OptimizerOptions> checked(const Values& values) {
  check_options(values);
  return std::make_unique<GroupOptions<Values>>(values);
}

}  // namespace

Adam::Adam(std::vector<at::Tensor> params, AdamOptions options)
    : Adam(std::vector<ParamGroup>{ParamGroup(std::move(params))}, options) {}

Adam::Adam(const std::vector<ParamGroup>& groups, AdamOptions defaults)
    : Optimizer(groups, std::make_unique<AdamRule<AdamOptions>>("Adam"), checked(defaults)) {}

AdamOptions& Adam::options(size_t group) {
  return options_as<AdamOptions>(options_of(group), "Adam");
}

AdamW::AdamW(std::vector<at::Tensor> params, AdamWOptions options)
    : AdamW(std::vector<ParamGroup>{ParamGroup(std::move(params))}, options) {}

AdamW::AdamW(const std::vector<ParamGroup>& groups, AdamWOptions defaults)
    : Optimizer(groups, std::make_unique<AdamRule<AdamWOptions>>("AdamW"), checked(defaults)) {}

AdamWOptions& AdamW::options(size_t group) {
  return options_as<AdamWOptions>(options_of(group), "AdamW");
}

}  // namespace tessera::optim
