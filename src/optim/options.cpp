#include "optim/options.h"

#include <c10/util/Exception.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <tuple>

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
void check_options(const AdamWOptions& options) { check_adam("AdamW", options); }

ParamGroup param_group(std::vector<at::Tensor> params, SGDOptions options) {
  return make_group(std::move(params), options);
}
ParamGroup param_group(std::vector<at::Tensor> params, AdamOptions options) {
  return make_group(std::move(params), options);
}
ParamGroup param_group(std::vector<at::Tensor> params, AdamWOptions options) {
  return make_group(std::move(params), options);
}

template <class Options>
std::unique_ptr<torch::optim::OptimizerOptions> GroupOptions<Options>::clone() const {
  return std::make_unique<GroupOptions>(values);
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::InputArchive& archive) {
  Options loaded;
  for_each_field(loaded, [&](const char* name, auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    c10::IValue value;
    archive.read(name, value);
    if constexpr (std::is_same_v<Field, std::optional<bool>>) {
      field = value.toOptional<bool>();
    } else if constexpr (std::is_same_v<Field, std::pair<double, double>>) {
      std::tie(field.first, field.second) = value.to<std::tuple<double, double>>();
    } else {
      field = value.to<Field>();
    }
  });
  check_options(loaded);
  values = loaded;
}

template <class Options>
void GroupOptions<Options>::serialize(torch::serialize::OutputArchive& archive) const {
  for_each_field(values, [&](const char* name, const auto& field) {
    if constexpr (std::is_same_v<decltype(field), const std::pair<double, double>&>) {
      archive.write(name, c10::IValue(std::make_tuple(field.first, field.second)));
    } else {
      archive.write(name, c10::IValue(field));
    }
  });
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
template SGDOptions& options_as(torch::optim::OptimizerOptions&, const char*);
template AdamOptions& options_as(torch::optim::OptimizerOptions&, const char*);
template AdamWOptions& options_as(torch::optim::OptimizerOptions&, const char*);

}  // namespace tessera::optim
