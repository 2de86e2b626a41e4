#include <tessera/nn/hooks.h>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

namespace tessera::nn {
namespace {

std::vector<at::Tensor> collect(c10::function_ref<void(TensorVisitor)> for_each) {
  std::vector<at::Tensor> tensors;
  for_each([&](at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

}  // namespace

void Value::refuse(const std::type_info& wanted) const {
  TORCH_CHECK_TYPE(false, "hook: expected the value", *name_ ? " '" : "", name_, *name_ ? "'" : "",
                   " to be asked for as ", c10::demangle(type_->name()), ", which it is, got ",
                   c10::demangle(wanted.name()));
}

const Value& Arguments::operator[](size_t index) const {
  TORCH_CHECK_INDEX(index < size(), "hook: expected the index of one of the call's ", size(),
                    " arguments, got ", index);
  return values_[index];
}

const Value* Arguments::find(std::string_view name) const {
  for (const auto& value : values_) {
    if (value.name() == name) return &value;
  }
  return nullptr;
}

void Arguments::for_each_tensor(TensorVisitor visit) const {
  for (const auto& value : values_) value.for_each_tensor(visit);
}

std::vector<at::Tensor> Arguments::tensors() const {
  return collect([this](TensorVisitor visit) { for_each_tensor(visit); });
}

const Value& Result::value() const {
  TORCH_CHECK_VALUE(value_.has_value(), "hook: expected a result, but the call ",
                    failed_ ? "ended by an exception" : "returns nothing",
                    "; ask has_value() first");
  return *value_;
}

void Result::for_each_tensor(TensorVisitor visit) const {
  if (value_) value_->for_each_tensor(visit);
}

std::vector<at::Tensor> Result::tensors() const {
  return collect([this](TensorVisitor visit) { for_each_tensor(visit); });
}

Result Result::failure() {
  Result result;
  result.failed_ = true;
  return result;
}

namespace {

/// Visits the elements of a container; whether one of them was replaced.
bool visit_elements(std::vector<c10::IValue>& elements, TensorVisitor visit) {
  bool replaced = false;
  for (auto& element : elements) {
    const auto before = element;
    detail::visit_ivalue(element, visit);
    replaced |= !element.is(before);
  }
  return replaced;
}

}  // namespace

// Lists and dicts are shared with whoever else holds the IValue: one whose tensors are replaced
// becomes a new one instead of being written to.
void detail::visit_ivalue(c10::IValue& value, TensorVisitor visit) {
  if (value.isTensor()) {
    auto tensor = value.toTensor();
    visit(tensor);
    if (!tensor.is_same(value.toTensor())) value = tensor;
  } else if (value.isList()) {
    const auto list = value.toList();
    auto elements = list.vec();
    if (!visit_elements(elements, visit)) return;
    auto changed = c10::impl::GenericList(list.elementType());
    for (auto& element : elements) changed.push_back(std::move(element));
    value = changed;
  } else if (value.isTuple()) {
    auto elements = value.toTupleRef().elements().vec();
    if (visit_elements(elements, visit)) value = c10::ivalue::Tuple::create(std::move(elements));
  } else if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    std::vector<c10::IValue> elements;
    for (const auto& entry : dict) elements.push_back(entry.value());
    if (!visit_elements(elements, visit)) return;
    auto changed = c10::impl::GenericDict(dict.keyType(), dict.valueType());
    size_t index = 0;
    for (const auto& entry : dict) changed.insert(entry.key(), std::move(elements[index++]));
    value = changed;
  }
}

}  // namespace tessera::nn
