#include "compiler/passes/list_parts.h"

#include "compiler/ir/operators.h"

#include <algorithm>

namespace tessera::compiler {
namespace {

/// The elements at these places of an argument or result.
Argument part_of(const Argument& whole, const std::vector<size_t>& places, size_t of) {
  Argument part = whole;
  if (whole.kind == Argument::Kind::List && whole.values.size() == of) {
    part.values.clear();
    for (const size_t place : places) part.values.push_back(whole.values[place]);
  } else if (whole.kind == Argument::Kind::Constant && whole.constant.isList() &&
             whole.constant.toListRef().size() == of) {  // a number for each
    auto numbers = c10::impl::GenericList(whole.constant.toList().elementType());
    for (const size_t place : places) numbers.push_back(whole.constant.toListRef()[place]);
    part.constant = std::move(numbers);
  }
  return part;
}

}  // namespace

std::optional<size_t> places_of(const Node& node) {
  if (!is_over_lists(node)) return std::nullopt;
  size_t places = 0;
  const auto fits = [&](const Argument& each) {
    if (each.kind != Argument::Kind::List || each.values.empty()) return true;
    if (places == 0) places = each.values.size();
    return each.values.size() == places;
  };
  if (!std::ranges::all_of(node.arguments, fits) || !std::ranges::all_of(node.results, fits))
    return std::nullopt;
  // A tensor beside the lists that is written could not be written by each part.
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (node.arguments[i].kind == Argument::Kind::Value && writes(node, i)) return std::nullopt;
  }
  const auto is_list = [](const Argument& each) { return each.kind == Argument::Kind::List; };
  if (places < 2 || !std::ranges::all_of(node.results, is_list)) return std::nullopt;
  return places;
}

Node part_of(const Node& node, const std::vector<size_t>& places) {
  const size_t of = places_of(node).value();
  Node part = node;
  for (auto& each : part.arguments) each = part_of(each, places, of);
  for (auto& each : part.results) each = part_of(each, places, of);
  return part;
}

}  // namespace tessera::compiler
