#pragma once

#include <tessera/compile/step.h>

#include "compiler/agreement.h"
#include "compiler/variant.h"

#include <deque>
#include <map>
#include <mutex>

namespace tessera::detail {

/// What a compiled function knows: its programs, and why there are no others.
struct Step::Impl {
  explicit Impl(CompileOptions given);

  static constexpr size_t kMostVariants = 8;
  static constexpr int kMostKept = 4;  // recordings in a row that leave tensors behind

  const CompileOptions options;
  std::recursive_mutex mutex;              // the function may call itself
  std::deque<compiler::Variant> variants;  // they stay where they are
  std::vector<at::Tensor> parameters;      // whose gradients the function changes
  std::vector<std::string> log;
  std::string why_eager;  // why the function runs as it is; empty if it needn't
  bool has_warned_of_numbers = false;
  bool is_full = false;  // new kinds of calls run as they are
  int kept_tensors = 0;  // recordings in a row that left tensors behind
  compiler::Variant* last = nullptr;
  std::vector<compiler::CallShape> kinds;  // of recorded calls, by number
  size_t kind = kNoKind;                   // of the last call
  std::string why_again;                   // why no program served it
  bool takes_numbers = true;               // numbers among arguments may vary
  compiler::Agreement agreement;
  std::optional<std::weak_ptr<const void>> module_lifetime, optimizer_lifetime;  // if known

  using Run = c10::function_ref<std::vector<at::Tensor>()>;

  /// Runs the function and records it.
  std::vector<at::Tensor> record(const StepArguments& given, compiler::CallShape shape, Run run);
  /// The same in a parallel mode: what the function does is undone, the program runs.
  std::vector<at::Tensor> record_parallel(const StepArguments& given, compiler::CallShape shape,
                                          Run run);

  /// What a step that was written for one rank does, without having done it.
  struct ParallelRecording {
    compiler::Recording recording;
    bool ignores_gradients = false;
  };
  ParallelRecording record_plain(const StepArguments& given,
                                 const std::vector<at::Tensor>& parameters,
                                 const std::vector<at::Tensor>& written, Run run);
  /// The program for this call that all ranks have, each for its own part of the batch.
  compiler::Variant* find_common(const compiler::CallShape& shape);
  /// What a program gave, as distributed tensors where the mode says so.
  std::vector<at::Tensor> placed(const compiler::Variant& variant,
                                 std::vector<at::Tensor> results) const;
  std::map<const compiler::Variant*, ParallelCall> parallel_calls;  // that programs were made for
  bool has_warned_of_mixing = false;
  void tell(const ParallelCall& call);

  /// Those of the options; null if there are none, or they are gone.
  torch::nn::Module* named_module() const;
  torch::optim::Optimizer* named_optimizer() const;
  std::vector<torch::nn::Module*> modules_of(const StepArguments& given) const;
  std::vector<torch::optim::Optimizer*> optimizers_of(const StepArguments& given) const;
  /// Whose gradients the function may change.
  std::vector<at::Tensor> known_parameters(const StepArguments& given) const;
  compiler::TensorNames names_for(const StepArguments& given) const;
  void warn_of_numbers(const compiler::Recording& recording, const StepArguments& given);
  void learn(const compiler::Recording& recording, const StepArguments& given);
  void take(compiler::CallShape shape, compiler::Recording recording, const StepArguments& given);
  std::optional<std::vector<compiler::NumberUse>> match(const compiler::Variant& variant,
                                                        const compiler::CallShape& shape,
                                                        const compiler::Recording& recording) const;
  /// Takes back that numbers may vary if this recording shows that they steer the function.
  void check_numbers(const compiler::CallShape& shape, const compiler::Recording& recording);
  std::string objection(const compiler::CallShape& shape,
                        const compiler::Recording& recording) const;
  bool has_no_place(const compiler::CallShape& shape, const compiler::Recording& recording) const;
  void fill_up();
  compiler::Variant* find_ready(const compiler::CallShape& shape);
  void fall_back(const std::string& why);
  void require_program() const;
  void make_ready(compiler::Variant& variant);
  void accept(compiler::Variant& variant, Graph graph, const std::vector<Pass>& further);
  void note_capture();
  void drop_gradients(const compiler::Recording& recording) const;
  size_t kind_of(const compiler::CallShape& shape);
};

/// The tensors that an optimizer of ours keeps for its parameters, by parameter and name.
struct OptimizerTensor {
  at::Tensor tensor, parameter;
  std::string name;
};
std::vector<OptimizerTensor> tensors_of(const torch::optim::Optimizer& optimizer);

}  // namespace tessera::detail
