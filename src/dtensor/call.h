#pragma once

#include "dtensor/part.h"

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::dtensor {

/// What is known of a plain number, such as the 2 of `x * 2`.
enum class Number : uint8_t { Unknown /* or no number */, Zero, Finite, NotFinite };
/// Of a plain tensor; looks at host memory only.
Number number_in(const at::Tensor& tensor);
Number number_in(const c10::Scalar& value);

/// A tensor as sharding rules see it.
struct Operand {
  Sizes sizes;
  Sizes strides;
  c10::ScalarType dtype;
  SpecPtr spec;  // null: a plain tensor that counts as replicated
  Number number = Number::Unknown;

  int64_t ndim() const { return static_cast<int64_t>(sizes.size()); }
  int64_t numel() const { return c10::multiply_integers(sizes); }
};

/// One argument of the schema that holds tensors.
struct TensorArgument {
  size_t index;                   // among all arguments
  std::vector<Operand> operands;  // none: an optional tensor left out
  std::vector<size_t> positions;  // of the operands in the list; {0} if it is no list
  bool is_list = false;
  bool is_written = false;
};

/// A call of an operator with global values: all that a sharding rule may look at. Everything here
/// is part of the key under which the choice is remembered.
class Call {
 public:
  Call(const c10::FunctionSchema& schema, torch::jit::Stack arguments);

  const c10::FunctionSchema& schema() const { return schema_; }
  /// Entries of a row: returns, then tensor arguments.
  size_t output_count() const { return schema_.returns().size(); }
  size_t input_count() const { return inputs_.size(); }

  const std::vector<TensorArgument>& inputs() const { return inputs_; }
  /// out= arguments, which rules do not see.
  const std::vector<TensorArgument>& destinations() const { return destinations_; }
  bool has(size_t input) const { return !inputs_[input].operands.empty(); }
  /// The tensor, or the first of the list.
  const Operand& operand(size_t input) const { return inputs_[input].operands.front(); }

  /// Any argument, by name or place; throws if the schema has none of that name.
  const c10::IValue& argument(std::string_view name) const;
  const c10::IValue& argument(size_t index) const { return arguments_[index]; }
  bool has_argument(std::string_view name) const;
  size_t index_of(std::string_view name) const;
  /// A dimension argument, wrapped for a tensor of `ndim` dimensions.
  int64_t dim(std::string_view name, int64_t ndim) const;
  /// A list of dimensions, wrapped; none or empty: all of them.
  std::vector<int64_t> dims(std::string_view name, int64_t ndim) const;
  const torch::jit::Stack& arguments() const { return arguments_; }

  /// A row with this placement for every return and Replicate for every tensor argument: to be
  /// changed where it is otherwise.
  std::vector<Placement> row(const Placement& outputs = Replicate()) const;

 private:
  const c10::FunctionSchema& schema_;
  torch::jit::Stack arguments_;
  std::vector<TensorArgument> inputs_;
  std::vector<TensorArgument> destinations_;
};

/// Arguments that differ from the global call's when it runs on parts.
struct LocalArguments {
  std::vector<std::pair<size_t, c10::IValue>> replaced;

  void set(size_t index, c10::IValue value) { replaced.emplace_back(index, std::move(value)); }
};

/// Everything of a call that can change how it runs on parts, as numbers: for distributed tensors
/// spec, sizes, strides and dtype, for others sizes, dtype and what kind of number they are, for
/// the rest their values. A wrong result is what a key that left something out would give.
class CallKey {
 public:
  void clear() {
    words_.clear();
    is_complete_ = true;
    has_plain_ = false;
  }
  void add(const c10::IValue& value);
  void add(uint64_t word) { words_.push_back(word); }
  /// False: a value of a kind that is not known here; the call must not be remembered.
  bool is_complete() const { return is_complete_; }
  /// Whether a plain tensor of several elements is among the values.
  bool has_plain() const { return has_plain_; }
  size_t hash() const;
  const std::vector<uint64_t>& words() const { return words_; }

 private:
  void add_tensor(const at::Tensor& tensor);
  void add_text(const std::string& text);

  std::vector<uint64_t> words_;
  bool is_complete_ = true;
  bool has_plain_ = false;
};

}  // namespace tessera::dtensor
