#include "optim/options.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <optional>
#include <sstream>
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

namespace {

/// Archives are written and read, never both: over a file in memory.
torch::serialize::InputArchive reopened(torch::serialize::OutputArchive& archive) {
  std::stringstream file;
  archive.save_to(file);
  torch::serialize::InputArchive opened;
  opened.load_from(file);
  return opened;
}

/// An option that tessera::optim has and torch::optim has not.
struct AddedOption {
  const char* name;
  std::optional<bool> stock;  // how torch::optim's behave; none: a choice of kernels, any will do
};
constexpr AddedOption kAdded[] = {{"maximize", false},
                                  {"decoupled_weight_decay", false},
                                  {"foreach", std::nullopt},
                                  {"fused", std::nullopt}};

bool is_choice_of_kernels(const std::string& name) { return name == "foreach" || name == "fused"; }

bool has_added(const OptionValues& options) {
  return std::ranges::any_of(kAdded,
                             [&](const AddedOption& added) { return options.count(added.name); });
}

std::string names_of(const OptionValues& options) {
  std::vector<std::string> names;
  for (const auto& [name, value] : options) names.push_back(name);
  return c10::Join(", ", names);
}

/// "a number with a fraction", as a user would say.
std::string type_name(const c10::IValue& value) {
  if (value.isNone()) return "None";
  if (value.isBool()) return "a bool";
  if (value.isInt()) return "an int";
  if (value.isDouble()) return "a double";
  if (value.isString()) return "a string";
  if (value.isTuple())
    return c10::str("a tuple of ", value.toTupleRef().elements().size(), " elements");
  return value.tagKind();
}

bool has_type_of(const c10::IValue& own, const c10::IValue& given) {
  if (!own.isTuple() || !given.isTuple()) return own.tagKind() == given.tagKind();
  const auto& expected = own.toTupleRef().elements();
  const auto& got = given.toTupleRef().elements();
  return std::ranges::equal(expected, got, has_type_of);
}

void check_type(const std::string& where, const std::string& name, const c10::IValue& own,
                const c10::IValue& given) {
  const bool is_optional = is_choice_of_kernels(name);
  const bool fits = is_optional ? given.isNone() || given.isBool() : has_type_of(own, given);
  TORCH_CHECK_VALUE(fits, where, ": expected ", is_optional ? "a bool or None" : type_name(own),
                    " as option '", name, "', got ", type_name(given));
}

/// torch::optim's check their options in constructors alone.
void check_range(const std::string& where, const std::string& name, const c10::IValue& value) {
  if (value.isTuple()) {
    for (const auto& beta : value.toTupleRef().elements())
      TORCH_CHECK_VALUE(!beta.isDouble() || (beta.toDouble() >= 0 && beta.toDouble() < 1), where,
                        ": expected option '", name, "' to be from 0 to below 1, got ",
                        beta.toDouble());
  }
  TORCH_CHECK_VALUE(!value.isDouble() || value.toDouble() >= 0 || name == "dampening", where,
                    ": expected option '", name, "' to be at least 0, got ", value.toDouble());
}

}  // namespace

OptionValues read_options(const torch::optim::OptimizerOptions& options) {
  torch::serialize::OutputArchive written;
  options.serialize(written);
  auto archive = reopened(written);
  OptionValues values;
  for (const auto& name : archive.keys()) archive.read(name, values[name]);
  return values;
}

OptionValues fitted_options(const std::string& where, const OptionValues& own,
                            const OptionValues& given) {
  OptionValues fitted = given;
  if (has_added(own) != has_added(given)) {
    for (const auto& [name, stock] : kAdded) {
      const auto value = given.find(name);
      TORCH_CHECK_VALUE(value == given.end() || !stock || value->second == *stock, where,
                        ": expected option '", name,
                        "' to be false, which torch::optim's do not "
                        "have, got ",
                        type_name(value->second),
                        " that is not; load it into an "
                        "optimizer of tessera::optim");
      fitted.erase(name);
      const auto mine = own.find(name);
      if (mine != own.end()) fitted[name] = stock ? c10::IValue(*stock) : mine->second;
    }
  }
  TORCH_CHECK_VALUE(std::ranges::equal(own, fitted, {}, &OptionValues::value_type::first,
                                       &OptionValues::value_type::first),
                    where, ": expected the options ", names_of(own), ", got ", names_of(given));
  for (const auto& [name, value] : fitted) {
    check_type(where, name, own.at(name), value);
    if (!has_added(own)) check_range(where, name, value);
  }
  return fitted;
}

void write_options(torch::optim::OptimizerOptions& options, const OptionValues& values) {
  torch::serialize::OutputArchive written;
  for (const auto& [name, value] : values) written.write(name, value);
  auto archive = reopened(written);
  options.serialize(archive);
}

std::unique_ptr<torch::optim::OptimizerOptions> loaded_options(
    const std::string& where, const torch::optim::OptimizerOptions& own,
    const OptionValues& given) {
  auto copy = own.clone();
  const auto fitted = fitted_options(where, read_options(own), given);
  try {
    write_options(*copy, fitted);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, where, ": ", error.what_without_backtrace());
  }
  return copy;
}

}  // namespace tessera::optim
