#pragma once

#include <tessera/nn/values.h>

#include <functional>
#include <string_view>
#include <typeinfo>

/// What hooks see of a call.
namespace tessera::nn {

/// One argument or result of a call, whatever its type.
class Value {
 public:
  template <class T>
  Value(T& value, const char* name)
      : address_(const_cast<std::remove_const_t<T>*>(&value)),
        type_(&typeid(T)),
        visit_([](void* address, TensorVisitor visit) {
          visit_tensors(*static_cast<T*>(address), visit);
        }),
        name_(name) {}

  const char* name() const { return name_; }  // "" if it has none
  template <class T>
  bool is() const {
    return *type_ == typeid(T);
  }
  /// Throws a TypeError that names both types if it is not a T.
  template <class T>
  T& get() const {
    if (!is<T>()) refuse(typeid(T));
    return *static_cast<T*>(address_);
  }
  void for_each_tensor(TensorVisitor visit) const { visit_(address_, visit); }

 private:
  [[noreturn]] void refuse(const std::type_info& wanted) const;

  void* address_;
  const std::type_info* type_;
  void (*visit_)(void*, TensorVisitor);
  const char* name_;
};

/// The arguments of one call of a module: what hooks see and may replace. An at::TensorList, an
/// ITensorListRef or a std::span<const at::Tensor> is there as a std::vector<at::Tensor>.
class Arguments {
 public:
  virtual ~Arguments() = default;
  size_t size() const { return values_.size(); }
  const Value& operator[](size_t index) const;
  /// By the name given in TESSERA_MODULE(Net, "x", "mask"); null if there is none.
  const Value* find(std::string_view name) const;
  at::Tensor& tensor(size_t index) const { return (*this)[index].get<at::Tensor>(); }
  void for_each_tensor(TensorVisitor visit) const;
  std::vector<at::Tensor> tensors() const;
  /// Calls the module again, hooks included, with copies of the present values.
  virtual Replay replay() const = 0;

 protected:
  std::vector<Value> values_;
};

/// What a call returned. Empty if it returns nothing or ended by an exception.
class Result {
 public:
  Result() = default;
  explicit Result(Value value) : value_(value) {}
  bool has_value() const { return value_.has_value(); }
  bool has_failed() const { return failed_; }
  template <class T>
  T& get() const {
    return value().get<T>();
  }
  at::Tensor& tensor() const { return get<at::Tensor>(); }
  void for_each_tensor(TensorVisitor visit) const;
  std::vector<at::Tensor> tensors() const;
  static Result failure();

 private:
  const Value& value() const;
  std::optional<Value> value_;
  bool failed_ = false;
};

}  // namespace tessera::nn
