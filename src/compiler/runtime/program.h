#pragma once

#include <tessera/compile/graph.h>

#include "compiler/codegen/module.h"
#include "compiler/runtime/shared_gathers.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::compiler {

/// A graph made ready to run: operators found, constants made, and for every value the moment
/// after which nothing needs it.
class Program {
 public:
  /// `compiled`: what emit() wrote of the graph, compiled and loaded; it runs kernels itself and
  /// has operators run here. Null: all nodes are operators and run here, one after the other.
  explicit Program(const Graph& graph, std::shared_ptr<Module> compiled = nullptr);

  /// Runs every node, below autograd. Inputs in the order of the graph's; arguments that operators
  /// write are consumed. Returns the values of the graph's outputs, in their order.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

 private:
  struct Slot {
    Argument::Kind kind;
    c10::IValue constant;
    std::vector<ValueId> values;
    bool is_optional_list;
    bool wants_tensor;  // a number is given as one
  };
  struct Instruction {
    c10::OperatorHandle op;
    std::vector<Slot> arguments;
    std::vector<size_t> written;                // arguments that are consumed
    std::vector<std::vector<ValueId>> results;  // first of those, then the operator's own
    std::vector<size_t> own;                    // which of its returns are its own
    std::vector<ValueId> last_used;
    size_t node;
    bool is_gather;
    bool asks_grad_mode;  // what it keeps for backward depends on that, below autograd, too
    std::string module;   // for messages
  };

  /// Memory that other ranks read in place, kept from run to run: one is taken that nobody holds.
  struct Sent {
    std::string group;
    std::vector<at::Tensor> kept = {};
  };

  friend struct Frame;

  static Instruction make(const Node& node, size_t index);
  static Slot make_slot(const Argument& argument, const c10::Argument& declared);
  void find_last_uses();
  void find_sent(const Graph& graph);
  at::Tensor memory_for(Sent& sent, const ValueType& type) const;
  void execute(const Instruction& instruction);
  void call(const Instruction& instruction);
  bool see_in_place(const Instruction& instruction);
  void push(const Slot& slot);
  void make_value(ValueId value);
  at::Tensor& at(ValueId value) { return values_[static_cast<size_t>(value)]; }
  void check_result(const Instruction& instruction, ValueId value) const;
  std::string where() const;

  std::vector<ValueType> types_;
  std::vector<ValueId> inputs_, outputs_;
  std::vector<std::optional<Instruction>> instructions_;  // by node; none for a kernel
  std::shared_ptr<Module> compiled_;
  std::vector<at::Tensor> values_;
  std::unordered_map<ValueId, Sent> sent_;
  SharedGathers shared_;
  const Instruction* running_ = nullptr;
  torch::jit::Stack stack_;
  std::vector<std::string> groups_;  // in which it communicates
  bool in_foreground_ = false;       // collectives take turns with computation
  bool is_checked_ = false;  // whether a run has given what was recorded, by sizes and strides
};

}  // namespace tessera::compiler
