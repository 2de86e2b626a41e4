#include <tessera/compile/graph.h>

#include <c10/util/Exception.h>

#include <ostream>

namespace tessera {
namespace {

std::vector<ValueId> tensors_in(const std::vector<Argument>& arguments) {
  std::vector<ValueId> tensors;
  for (const Argument& argument : arguments) {
    for (const ValueId value : argument.values) {
      if (value != kNoValue) tensors.push_back(value);
    }
  }
  return tensors;
}

}  // namespace

int64_t ValueType::numel() const {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

int64_t ValueType::bytes() const { return numel() * static_cast<int64_t>(c10::elementSize(dtype)); }

bool ValueType::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

Argument Argument::of(c10::IValue constant) {
  Argument argument;
  argument.constant = std::move(constant);
  return argument;
}

Argument Argument::of(ValueId value) {
  Argument argument;
  argument.kind = Kind::Value;
  argument.values = {value};
  return argument;
}

Argument Argument::of(std::vector<ValueId> list) {
  Argument argument;
  argument.kind = Kind::List;
  argument.values = std::move(list);
  return argument;
}

std::vector<ValueId> Node::used() const { return tensors_in(arguments); }

std::vector<ValueId> Node::defined() const { return tensors_in(results); }

ValueId Graph::add_value(ValueType type) {
  types_.push_back(std::move(type));
  return static_cast<ValueId>(types_.size() - 1);
}

std::ostream& operator<<(std::ostream& stream, const Graph& graph) { return stream << graph.str(); }

}  // namespace tessera
