#pragma once

#include <tessera/compile/graph.h>

#include "compiler/kernels/kernels.h"
#include "compiler/runtime/instructions.h"
#include "compiler/runtime/replay.h"
#include "compiler/runtime/shared_gathers.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::compiler {

/// A graph made ready to run: one instruction per node, which calls an operator or a kernel and
/// frees the values that nothing needs after it. On a GPU the same instructions may be replayed as
/// one CUDA graph, see Note [replay].
class Program {
 public:
  /// `kernels`: of the graph's fused nodes; it may be empty if there are none.
  explicit Program(const Graph& graph, std::vector<Launch> kernels = {});
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// On a GPU later runs replay one CUDA graph, see Replay: for programs of whole steps, whose
  /// parameters and state lie where they lay. `graph`: that of the program.
  void enable_replay(const Graph& graph);

  /// Runs it, below autograd. Inputs in the order of the graph's; arguments that operators write
  /// are consumed, and inputs that the graph writes are written. Returns the values of the graph's
  /// outputs, in their order.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

  /// Gives memory back that is of use to later runs alone.
  void release_memory() {
    if (replay_) replay_->release();
    for (auto& pool : pools_) pool.kept.clear();
    blocks_.clear();
  }

  /// How often it was captured, for ranks to compare; see Replay.
  int captures() const { return replay_ ? replay_->captures() : 0; }
  /// Why it is not replayed as a CUDA graph; empty if it is, or it is not for a GPU.
  const std::string& why_not_replayed() const;

 private:
  struct Slot {
    Argument::Kind kind;
    c10::IValue constant;
    std::vector<ValueId> values;
    bool is_optional_list;
  };
  /// Of an operator of the dispatcher.
  struct Call {
    c10::OperatorHandle op;
    std::vector<Slot> arguments = {};
    std::vector<size_t> written = {};                // arguments that are consumed
    std::vector<std::vector<ValueId>> results = {};  // first of those, then the operator's own
    std::vector<size_t> own;                         // which of its returns are its own
    bool is_gather;
    bool asks_grad_mode;  // what it keeps for backward depends on that, below autograd, too
    std::optional<size_t> factors;  // of a product of two matrices: the left one's argument
  };
  /// Of a kernel of ours.
  struct KernelCall {
    Launch launch;
    std::vector<ValueId> inputs = {};
    std::vector<ValueId> outputs;
    std::vector<ValueId> in_place = {};  // by output: the input whose memory it takes, or kNoValue
    std::vector<ValueId> over = {};      // by output: of what ends here, if nobody else has it
  };
  struct Instruction {
    std::optional<Call> call = std::nullopt;
    std::optional<KernelCall> kernel = std::nullopt;
    std::vector<ValueId> freed;
    std::string op, module;  // for messages
  };

  /// Memory that other ranks read in place, for values of one size, kept from run to run: one is
  /// taken that nobody holds, so there are as many as the program ever has at once.
  struct SharedPool {
    std::string group;
    int64_t bytes;
    size_t values = 0;  // that are made in it
    std::vector<at::Tensor> kept = {};
  };

  static Call make_call(const Node& node);
  static KernelCall make_kernel_call(const Node& node, Launch launch,
                                     const std::vector<ValueId>& in_place,
                                     const std::vector<ValueId>& over);
  static Slot make_slot(const Argument& argument, const c10::Argument& declared);
  /// By product.
  static std::map<size_t, RowUpdate> find_row_updates(const Graph& graph);
  void find_sent(const Graph& graph);
  static at::Tensor memory_for(SharedPool& pool, const ValueType& type);
  std::vector<at::Tensor> run_instructions(const std::vector<at::Tensor>& inputs);
  void execute();
  void execute(const Call& call, size_t node);
  void execute(const KernelCall& call);
  void note_writes(const Call& call);
  void execute_by_rows(const Call& product, const RowUpdate& rows);
  at::Tensor reduce(const RowUpdate& rows, const at::Tensor& made);
  at::Tensor memory_for_block(const RowUpdate& rows, int64_t count, const ValueType& like);
  static int64_t rows_of_block(const RowUpdate& rows, int64_t row_bytes);
  bool multiply(const Call& call);
  void call(const Call& call);
  bool see_in_place(const Call& call, size_t node);
  void push(const Slot& slot);
  at::Tensor make_value(ValueId value);
  at::Tensor& at(ValueId value) { return values_[static_cast<size_t>(value)]; }
  void check_results(const Call& call) const;
  void check_result(const Call& call, ValueId value) const;
  void write_inputs(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  std::string where() const;

  std::vector<ValueType> types_;
  std::vector<ValueId> inputs_;
  std::vector<GraphOutput> outputs_;
  std::vector<int> written_;          // by output: the input that it is written to, or -1
  std::vector<bool> is_overwritten_;  // by output: lies in an input that another one is written to
  std::vector<Instruction> instructions_;
  std::map<size_t, RowUpdate> row_updates_;
  std::map<std::string, at::Tensor> blocks_;  // memory for those of gradients, by group or none
  std::vector<at::Tensor> values_;
  std::unordered_map<ValueId, size_t> sent_;  // in which of the pools
  std::vector<SharedPool> pools_;
  SharedGathers shared_;
  const Instruction* running_ = nullptr;
  bool has_updated_ = false;  // a weight in this run, though a message may still fail
  torch::jit::Stack stack_;
  std::vector<std::string> groups_;  // in which it communicates
  bool in_foreground_ = false;       // collectives take turns with computation
  bool is_checked_ = false;       // whether a run has given what was recorded, by sizes and strides
  std::optional<Replay> replay_;  // for a GPU
};

}  // namespace tessera::compiler
