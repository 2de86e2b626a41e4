// Options by name: what groups write into an archive, and what is read from one.
#include "optim/options.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <vector>

namespace tessera::optim {

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

/// Optimizers that torch::optim does not have, which check what they load themselves.
bool is_ours_alone(const OptionValues& options) {
  return options.count("ns_steps") != 0 || options.count("beta2_decay") != 0;
}

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

/// Adafactor's eps, of which the first may be none.
bool is_pair_of_eps(const c10::IValue& value) {
  if (!value.isTuple() || value.toTupleRef().elements().size() != 2) return false;
  const auto& elements = value.toTupleRef().elements();
  return (elements[0].isNone() || elements[0].isDouble()) && elements[1].isDouble();
}

void check_type(const std::string& where, const std::string& name, const c10::IValue& own,
                const c10::IValue& given) {
  std::string expected = type_name(own);
  bool fits = has_type_of(own, given);
  if (is_choice_of_kernels(name)) {
    expected = "a bool or None";
    fits = given.isNone() || given.isBool();
  } else if (name == "adjust_lr_fn") {
    expected = "a string or None";
    fits = given.isNone() || given.isString();
  } else if (name == "eps" && own.isTuple()) {
    fits = is_pair_of_eps(given);
  }
  TORCH_CHECK_VALUE(fits, where, ": expected ", expected, " as option '", name, "', got ",
                    type_name(given));
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
  if (!is_ours_alone(own) && has_added(own) != has_added(given)) {
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
    if (!has_added(own) && !is_ours_alone(own)) check_range(where, name, value);
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
