#pragma once

#include <tessera/dtensor/placement.h>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// The program of a train step: a list of operators over values that never change. See
/// docs/compiler.md for its text form.
namespace tessera {

/// A tensor of the program, by number.
using ValueId = int32_t;
constexpr ValueId kNoValue = -1;  // an absent tensor, in lists and optional arguments

/// What is known of a value before the program runs; sizes are those of this rank.
struct ValueType {
  at::ScalarType dtype = at::kFloat;
  c10::Device device = at::kCPU;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  /// How the ranks' values make up the global one; none: not a distributed value.
  std::optional<Placement> placement = std::nullopt;

  bool operator==(const ValueType&) const = default;
  int64_t numel() const;
  int64_t bytes() const;
  bool is_contiguous() const;
};

/// An argument of an operator, or what it gives back.
struct Argument {
  enum class Kind {
    Constant,  // a number, a list of numbers, a dtype, None ...
    Value,     // values[0]
    List,      // a list of tensors; kNoValue for absent ones
  };
  Kind kind = Kind::Constant;
  c10::IValue constant = {};
  std::vector<ValueId> values = {};

  static Argument of(c10::IValue constant);
  static Argument of(ValueId value);
  static Argument of(std::vector<ValueId> list);
};

/// How large the buckets of collectives become, in bytes: one is closed by the tensor with which it
/// reaches its cap. The first closes early, so that communication starts early.
struct BucketCaps {
  int64_t first = int64_t{1} << 20;
  int64_t later = int64_t{25} << 20;
  bool operator==(const BucketCaps&) const = default;
};

class Graph;

/// One call of an operator.
///
/// Values never change, but memory may: an argument that the operator writes (by its schema) is
/// consumed, so that nothing after this node may use it or a view of it. `results` begin with what
/// consumed arguments have become, in the order of the arguments (none for an absent one); then
/// come the operator's own tensors and lists, without those that are consumed arguments handed
/// back.
struct Node {
  std::string op;                   // "aten::add.Tensor", "_c10d_functional::wait_tensor"
  std::vector<Argument> arguments;  // one per argument of the schema
  std::vector<Argument> results;    // Value or List
  std::string module = {};          // path of the module whose forward called it, "" if unknown
  /// Of "tessera::fused", what its one kernel computes: an input per tensor used, an output per
  /// tensor defined.
  std::shared_ptr<const Graph> body = nullptr;
  /// Of a collective, one number per tensor sent: the how-many-th it was in its group when it was
  /// recorded, the same on all ranks of the group. Empty if unknown. No part of the text.
  std::vector<int64_t> messages = {};
  /// Of an average of replicate: its bucket_cap_mb. No part of the text.
  std::optional<BucketCaps> bucket_caps = std::nullopt;

  std::vector<ValueId> used() const;     // in the order of the arguments, without kNoValue
  std::vector<ValueId> defined() const;  // in the order of the results, without kNoValue
};

enum class InputKind { Parameter, Buffer, State, Gradient, Argument, Outside };

/// A tensor that exists before the program runs. None that is written overlaps another in memory.
struct GraphInput {
  ValueId value = kNoValue;
  InputKind kind = InputKind::Outside;
  std::string name;  // "net1.weight", "exp_avg of net1.weight", "argument 0"
};

enum class OutputKind {
  Result,    // returned to the caller
  Write,     // copied into the memory of the input `target`
  Gradient,  // becomes the gradient of the input `target`; kNoValue: it has none afterwards
};

struct GraphOutput {
  ValueId value = kNoValue;
  OutputKind kind = OutputKind::Result;
  ValueId target = kNoValue;
};

class Graph {
 public:
  std::vector<GraphInput> inputs;
  std::vector<Node> nodes;  // in the order of execution
  std::vector<GraphOutput> outputs;

  ValueId add_value(ValueType type);
  const ValueType& type(ValueId value) const { return types_.at(static_cast<size_t>(value)); }
  ValueType& type(ValueId value) { return types_.at(static_cast<size_t>(value)); }
  size_t value_count() const { return types_.size(); }

  /// The text form; parse(str()) gives an equal graph, also in the numbers of its values.
  std::string str() const;
  /// Throws a ValueError that names the line if the text is no graph.
  static Graph parse(const std::string& text);

 private:
  std::vector<ValueType> types_;
};

std::ostream& operator<<(std::ostream& stream, const Graph& graph);

}  // namespace tessera
