#include "state/optimizer_text.h"

#include "state/files/json_text.h"

#include <cmath>
#include <limits>

namespace tessera::state {
namespace {

/// A double is an object, so that 1.0 is told from 1; JSON has no infinities.
Json double_to_json(double value) {
  if (std::isnan(value)) return {{"double", "nan"}};
  if (std::isinf(value)) return {{"double", value > 0 ? "inf" : "-inf"}};
  return {{"double", value}};
}

Json option_to_json(const std::string& function, const std::string& name,
                    const c10::IValue& value) {
  if (value.isNone()) return nullptr;
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return double_to_json(value.toDouble());
  if (value.isString()) return value.toStringRef();
  TORCH_CHECK_NOT_IMPLEMENTED(value.isTuple(), function,
                              ": expected options of the optimizer that are numbers, strings or "
                              "tuples of them, got '",
                              name, "' of type ", value.tagKind());
  auto elements = Json::array();
  for (const auto& element : value.toTupleRef().elements())
    elements.push_back(option_to_json(function, name, element));
  return {{"tuple", std::move(elements)}};
}

double double_of_json(const FileName& file, const Json& json, const std::string& name) {
  if (json.is_number()) return json.get<double>();
  if (json == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (json == "inf") return std::numeric_limits<double>::infinity();
  file.require(json == "-inf", "expected a number as option '", name, "' of the optimizer, got ",
               json.type_name());
  return -std::numeric_limits<double>::infinity();
}

c10::IValue option_of_json(const FileName& file, const Json& json, const std::string& name) {
  if (json.is_null()) return {};
  if (json.is_boolean()) return json.get<bool>();
  file.require(!json.is_number_unsigned() || json.get<uint64_t>() <= INT64_MAX,
               "expected a number of 64 bits as option '", name, "' of the optimizer, got ",
               json.dump());
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_string()) return json.get<std::string>();
  if (json.is_object() && json.contains("double"))
    return double_of_json(file, json["double"], name);
  std::vector<c10::IValue> elements;
  for (const auto& element : array_field(file, json, "tuple", "option '" + name + "'"))
    elements.push_back(option_of_json(file, element, name));
  return c10::ivalue::Tuple::create(std::move(elements));
}

}  // namespace

std::string optimizer_text(const std::string& function, const OptimizerStateDict& dict) {
  auto list = Json::array();
  for (const auto& group : dict.param_groups) {
    auto options = Json::object();
    for (const auto& [name, value] : group.options)
      options[name] = option_to_json(function, name, value);
    list.push_back({{"params", group.params}, {"options", std::move(options)}});
  }
  return to_text(function, {{"kind", dict.kind}, {"groups", std::move(list)}});
}

OptimizerStateDict parse_optimizer(const FileName& file, const std::string& text) {
  OptimizerStateDict dict;
  const auto json = parse_json(file, text);
  if (json.contains("kind")) dict.kind = string_field(file, json, "kind", "the optimizer");
  for (const auto& item : array_field(file, json, "groups", "the optimizer")) {
    auto& group = dict.param_groups.emplace_back();
    for (const auto& name : array_field(file, item, "params", "a group of the optimizer")) {
      file.require(name.is_string(), "expected names of parameters in a group of the optimizer");
      group.params.push_back(name.get<std::string>());
    }
    for (const auto& option :
         object_field(file, item, "options", "a group of the optimizer").items())
      group.options[option.key()] = option_of_json(file, option.value(), option.key());
  }
  return dict;
}

}  // namespace tessera::state
