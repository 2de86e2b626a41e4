#pragma once

#include <tessera/compile/step.h>

#include "compiler/runtime/program.h"
#include "compiler/trace/recording.h"

namespace tessera::compiler {

/// What a recording was made with, as far as it can be told from a call.
struct CallShape {
  struct TensorShape {
    ValueType type;
    bool requires_grad;
    bool is_defined;
    bool is_conj = false, is_neg = false;
    uint64_t distribution = 0;  // of a distributed tensor, 0 of others
    int shares_with = -1;       // the first argument in the same storage
    int64_t distance = 0;       // from its first element
    bool operator==(const TensorShape&) const = default;
  };
  std::vector<TensorShape> tensors;
  std::vector<uint64_t> numbers;
  std::vector<const void*> objects;  // modules and optimizers
  bool grad_mode = true;
  std::vector<int> autocast;           // by device type: off, or the dtype
  std::vector<double> learning_rates;  // of optimizers that are not ours, whose numbers are fixed
  std::vector<bool> training;          // of every module below those given

  bool operator==(const CallShape&) const = default;
};
/// The tensors given, of distributed ones this rank's parts.
std::vector<at::Tensor> local_tensors(const detail::StepArguments& given);
CallShape shape_of(const detail::StepArguments& given,
                   const std::vector<torch::nn::Module*>& modules,
                   const std::vector<torch::optim::Optimizer*>& optimizers);
/// In what two calls differ, for a user; empty if in nothing.
std::string difference(const CallShape& before, const CallShape& after);

/// One program of a function, for one kind of call.
class Variant {
 public:
  Variant(CallShape shape, Recording recording, const detail::StepArguments& given);

  /// Why it can't serve this call; empty if it can.
  std::string misfit(const CallShape& shape) const;
  /// The same, but for which gradients exist.
  std::string misfit_besides_gradients(const CallShape& shape) const;

  const CallShape& shape() const { return shape_; }
  const Recording& recording() const { return recording_; }
  bool is_ready() const { return program_ != nullptr; }
  /// Makes it ready: two recordings gave the same graph, of which this is the program; `compiled`
  /// as for Program.
  void accept(Graph graph, std::shared_ptr<Module> compiled);
  /// It clears gradients before it makes its own: those present before a call don't matter.
  void ignore_gradients() { ignores_gradients_ = true; }
  const Graph& graph() const { return graph_; }
  /// Names what the program sends to other ranks; see Agreement.
  int64_t messages() const { return messages_; }

  std::vector<at::Tensor> run(const detail::StepArguments& given);

 private:
  /// What a tensor of the program is to the caller.
  struct Place {
    int argument = -1;  // which tensor argument
    int owner = -1;     // whose gradient, among recording_.gradients
  };
  struct Target {
    OutputKind kind;
    int input = -1;              // that is written
    int owner = -1;              // whose gradient it becomes
    bool shares_memory = false;  // with an input that is written before it
    bool is_constant = false;    // a result that is the program's own
  };

  bool reads_gradient(size_t owner) const;
  std::string changed_inputs() const;
  void drop_gradients() const;
  std::vector<at::Tensor> gather_inputs(const detail::StepArguments& given) const;
  void find_shared_memory(const std::vector<at::Tensor>& values,
                          const std::vector<at::Tensor>& inputs);
  std::vector<at::Tensor> place_outputs(std::vector<at::Tensor> values,
                                        const std::vector<at::Tensor>& inputs);

  CallShape shape_;
  Recording recording_;
  bool ignores_gradients_ = false;
  std::vector<Place> places_;       // by input
  std::vector<bool> needed_grads_;  // by input that is not an argument: whether it required one
  std::unique_ptr<Program> program_;
  Graph graph_;  // as the program runs it
  int64_t messages_ = 0;
  std::vector<Target> targets_;  // by output
  bool knows_shared_memory_ = false;
};

}  // namespace tessera::compiler
