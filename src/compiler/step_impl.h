#pragma once

#include <tessera/compile/step.h>

#include "compiler/agreement.h"
#include "compiler/variant.h"

#include <algorithm>
#include <deque>
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
  bool has_warned_of_scalars = false;
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
  /// Once, when many programs are made that differ by scalars among the arguments alone.
  void warn_of_scalars(const compiler::CallShape& shape);
  std::string objection(const compiler::CallShape& shape,
                        const compiler::Recording& recording) const;
  bool has_no_place(const compiler::CallShape& shape, const compiler::Recording& recording) const;
  void fill_up();
  compiler::Variant* find_ready(const compiler::CallShape& shape);
  bool has_programs() const {
    return std::ranges::any_of(variants, [](const auto& variant) { return variant.is_ready(); });
  }
  void agree_on(compiler::Variant* made);
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
