// What is in an argument whose type says nothing of it.
#include <tessera/compile/step_arguments.h>

#include <c10/util/Exception.h>

namespace tessera::detail {

void StepArguments::add_value(const c10::IValue& value) {
  add_number(std::hash<std::string>()(value.tagKind()));
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isBool()) {
    add_number(value.toBool());
  } else if (value.isInt()) {
    add_number(static_cast<uint64_t>(value.toInt()));
  } else if (value.isDouble()) {
    add_number(std::bit_cast<uint64_t>(value.toDouble()));
  } else if (value.isString()) {
    add_number(std::hash<std::string>()(value.toStringRef()));
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    add_number(elements.size());
    for (const auto& element : elements) add_value(element);
  } else if (value.isTuple()) {
    const auto& elements = value.toTupleRef().elements();
    add_number(elements.size());
    for (const auto& element : elements) add_value(element);
  } else if (value.isGenericDict()) {
    const auto entries = value.toGenericDict();
    add_number(entries.size());
    for (const auto& entry : entries) {
      add_value(entry.key());
      add_value(entry.value());
    }
  } else {
    TORCH_CHECK_TYPE(value.isNone(),
                     "compile: expected IValues of tensors, numbers, texts, lists, tuples and "
                     "dicts among the arguments, got one of kind ",
                     value.tagKind(),
                     ", whose changes would not be seen; let the function capture it");
  }
}

}  // namespace tessera::detail
