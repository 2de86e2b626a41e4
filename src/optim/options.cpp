#include "optim/options.h"

#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace tessera::optim {

namespace {

/// The fields of each kind of options, once, for saving and loading.
template <class Options, class Field>
void for_each_field(Options& options, Field&& field)
  requires std::is_same_v<std::remove_const_t<Options>, SGDOptions>
{
  field("lr", options.lr);
  field("momentum", options.momentum);
  field("dampening", options.dampening);
  field("weight_decay", options.weight_decay);
  field("nesterov", options.nesterov);
  field("maximize", options.maximize);
  field("foreach", options.foreach);
  field("fused", options.fused);
}

template <class Options, class Field>
void for_each_field(Options& options, Field&& field)
  requires std::is_same_v<std::remove_const_t<Options>, MuonOptions>
{
  field("lr", options.lr);
  field("weight_decay", options.weight_decay);
  field("momentum", options.momentum);
  field("nesterov", options.nesterov);
  field("ns_coefficients", options.ns_coefficients);
  field("eps", options.eps);
  field("ns_steps", options.ns_steps);
  field("adjust_lr_fn", options.adjust_lr_fn);
}

template <class Options, class Field>
void for_each_field(Options& options, Field&& field)
  requires std::is_same_v<std::remove_const_t<Options>, AdafactorOptions>
{
  field("lr", options.lr);
  field("beta2_decay", options.beta2_decay);
  field("eps", options.eps);
  field("d", options.d);
  field("weight_decay", options.weight_decay);
  field("foreach", options.foreach);
  field("maximize", options.maximize);
}

/// All but AdamW's state_dtype, which is where state lies, not what it is.
template <class Options, class Field>
void for_each_field(Options& options, Field&& field) {
  field("lr", options.lr);
  field("betas", options.betas);
  field("eps", options.eps);
  field("weight_decay", options.weight_decay);
  field("amsgrad", options.amsgrad);
  field("maximize", options.maximize);
  field("foreach", options.foreach);
  field("fused", options.fused);
  if constexpr (requires { options.decoupled_weight_decay; }) {
    field("decoupled_weight_decay", options.decoupled_weight_decay);
  }
}

// Fields as archives hold them.
template <class Field>
c10::IValue to_value(const Field& field) {
  return field;
}
template <class First>
c10::IValue to_value(const std::pair<First, double>& field) {
  return c10::ivalue::Tuple::create(c10::IValue(field.first), c10::IValue(field.second));
}
c10::IValue to_value(const std::array<double, 3>& field) {
  return std::make_tuple(field[0], field[1], field[2]);
}

template <class Field>
void from_value(const c10::IValue& value, Field& field) {
  field = value.to<Field>();
}
template <class Value>
void from_value(const c10::IValue& value, std::optional<Value>& field) {
  field = value.toOptional<Value>();
}
template <class First>
void from_value(const c10::IValue& value, std::pair<First, double>& field) {
  const auto& elements = value.toTupleRef().elements();
  from_value(elements.at(0), field.first);
  from_value(elements.at(1), field.second);
}
void from_value(const c10::IValue& value, std::array<double, 3>& field) {
  const auto& elements = value.toTupleRef().elements();
  for (size_t i = 0; i < field.size(); ++i) from_value(elements.at(i), field[i]);
}

void check_at_least_zero(const char* optimizer, const char* name, double value) {
  TORCH_CHECK_VALUE(value >= 0, optimizer, ": expected ", name, " of at least 0, got ", value,
                    "; correct the option");
}

void check_one_kind_of_kernels(const char* optimizer, const std::optional<bool>& foreach,
                               const std::optional<bool>& fused) {
  TORCH_CHECK_VALUE(!(foreach.value_or(false) && fused.value_or(false)), optimizer,
                    ": expected at most one of foreach and fused, got both; set one of them");
}

template <class Options>
void check_adam(const char* optimizer, const Options& options) {
  check_at_least_zero(optimizer, "lr", options.lr);
  check_at_least_zero(optimizer, "eps", options.eps);
  check_at_least_zero(optimizer, "weight_decay", options.weight_decay);
  for (const double beta : {options.betas.first, options.betas.second}) {
    TORCH_CHECK_VALUE(beta >= 0 && beta < 1, optimizer, ": expected betas from 0 to below 1, got (",
                      options.betas.first, ", ", options.betas.second, "); correct the option");
  }
  check_one_kind_of_kernels(optimizer, options.foreach, options.fused);
}

template <class Options>
ParamGroup make_group(std::vector<at::Tensor> params, Options options) {
  check_options(options);
  return {std::move(params), std::make_unique<GroupOptions<Options>>(std::move(options))};
}

}  // namespace

void check_options(const SGDOptions& options) {
  check_at_least_zero("SGD", "lr", options.lr);
  check_at_least_zero("SGD", "momentum", options.momentum);
  check_at_least_zero("SGD", "weight_decay", options.weight_decay);
  TORCH_CHECK_VALUE(
      !options.nesterov || (options.momentum > 0 && options.dampening == 0),
      "SGD: expected nesterov with a momentum above 0 and no dampening, got momentum ",
      options.momentum, " and dampening ", options.dampening,
      "; correct them, or leave nesterov out");
  check_one_kind_of_kernels("SGD", options.foreach, options.fused);
}

void check_options(const AdamOptions& options) { check_adam("Adam", options); }

void check_options(const AdamWOptions& options) {
  check_adam("AdamW", options);
  if (!options.state_dtype) return;
  const auto dtype = *options.state_dtype;
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kByte,
                    "AdamW: expected state_dtype to be kFloat, kBFloat16 or kByte (8 bits), got ",
                    dtype, "; correct the option, or leave it out");
  TORCH_CHECK_VALUE(!options.fused.value_or(false) && !options.foreach.value_or(false),
                    "AdamW: expected no fused or foreach kernels with a state_dtype, got ",
                    options.fused.value_or(false) ? "fused" : "foreach", "; leave one of them out");
  TORCH_CHECK_VALUE(!options.amsgrad || dtype != at::kByte,
                    "AdamW: expected amsgrad = false with state of 8 bits, got true; take "
                    "state_dtype = kBFloat16");
}

void check_options(const MuonOptions& options) {
  check_at_least_zero("Muon", "lr", options.lr);
  check_at_least_zero("Muon", "weight_decay", options.weight_decay);
  check_at_least_zero("Muon", "momentum", options.momentum);
  check_at_least_zero("Muon", "eps", options.eps);
  TORCH_CHECK_VALUE(options.ns_steps >= 0 && options.ns_steps < 100,
                    "Muon: expected ns_steps from 0 to 99, got ", options.ns_steps,
                    "; correct the option");
  const auto& adjust = options.adjust_lr_fn;
  TORCH_CHECK_VALUE(!adjust || *adjust == "original" || *adjust == "match_rms_adamw",
                    "Muon: expected adjust_lr_fn \"original\" or \"match_rms_adamw\", got \"",
                    adjust.value_or(""), "\"; correct the option");
}

void check_options(const AdafactorOptions& options) {
  check_at_least_zero("Adafactor", "lr", options.lr);
  check_at_least_zero("Adafactor", "eps[0]", options.eps.first.value_or(0));
  check_at_least_zero("Adafactor", "eps[1]", options.eps.second);
  check_at_least_zero("Adafactor", "weight_decay", options.weight_decay);
  TORCH_CHECK_VALUE(options.beta2_decay <= 0, "Adafactor: expected beta2_decay of at most 0, got ",
                    options.beta2_decay, "; correct the option");
  TORCH_CHECK_VALUE(options.d >= 1, "Adafactor: expected d of at least 1, got ", options.d,
                    "; correct the option");
  TORCH_CHECK_NOT_IMPLEMENTED(!options.foreach.value_or(false),
                              "Adafactor: expected foreach = false, got true; there are no list "
                              "kernels for it, leave foreach out");
}

ParamGroup param_group(std::vector<at::Tensor> params, SGDOptions options) {
  return make_group(std::move(params), options);
}
ParamGroup param_group(std::vector<at::Tensor> params, AdamOptions options) {
  return make_group(std::move(params), options);
}
ParamGroup param_group(std::vector<at::Tensor> params, AdamWOptions options) {
  return make_group(std::move(params), options);
}
ParamGroup param_group(std::vector<at::Tensor> params, MuonOptions options) {
  return make_group(std::move(params), std::move(options));
}
ParamGroup param_group(std::vector<at::Tensor> params, AdafactorOptions options) {
  return make_group(std::move(params), options);
}

template <class Options>
std::unique_ptr<torch::optim::OptimizerOptions> GroupOptions<Options>::clone() const {
  return std::make_unique<GroupOptions>(values);
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::InputArchive& archive) {
  Options loaded = values;
  for_each_field(loaded, [&](const char* name, auto& field) {
    c10::IValue value;
    archive.read(name, value);
    from_value(value, field);
  });
  check_options(loaded);
  values = loaded;
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_field(
      values, [&](const char* name, const auto& field) { archive.write(name, to_value(field)); });
}

template <class Options>
Options& options_as(torch::optim::OptimizerOptions& options, const char* optimizer) {
  auto* const known = dynamic_cast<GroupOptions<Options>*>(&options);
  TORCH_CHECK_TYPE(known != nullptr, optimizer, ": expected the options of its own groups to be ",
                   optimizer,
                   "Options of tessera::optim, got options of another optimizer; make the group "
                   "with tessera::optim::param_group(params, ",
                   optimizer, "Options{...})");
  return known->values;
}

template class GroupOptions<SGDOptions>;
template class GroupOptions<AdamOptions>;
template class GroupOptions<AdamWOptions>;
template class GroupOptions<MuonOptions>;
template class GroupOptions<AdafactorOptions>;
template SGDOptions& options_as(torch::optim::OptimizerOptions&, const char*);
template AdamOptions& options_as(torch::optim::OptimizerOptions&, const char*);
template AdamWOptions& options_as(torch::optim::OptimizerOptions&, const char*);
template MuonOptions& options_as(torch::optim::OptimizerOptions&, const char*);
template AdafactorOptions& options_as(torch::optim::OptimizerOptions&, const char*);

}  // namespace tessera::optim
