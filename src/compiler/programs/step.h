#pragma once

#include <tessera/detail/compile/step.h>

#include "compiler/programs/call_guards.h"
#include "compiler/programs/program_cache.h"
#include "compiler/programs/variant.h"
#include "compiler/record/dry_run.h"

#include <mutex>

namespace tessera::detail {

/// What a compiled function knows: its programs, and why there are no others.
struct Step::Impl {
  Impl(CompileOptions given, std::span<const std::byte> function_object);
  ~Impl();

  static constexpr int kMostKept = 4;  // recordings in a row that leave tensors behind

  const CompileOptions options;
  const std::span<const std::byte> function;
  std::recursive_mutex mutex;  // the function may call itself
  compiler::ProgramCache<compiler::Variant> variants;
  std::vector<at::Tensor> parameters;  // whose gradients the function changes
  bool has_warned_of_numbers = false;
  int64_t evictions = 0;  // programs that gave way to others, on any rank
  int64_t resting = 0;    // calls without a program that run eagerly before one is recorded
  int kept_tensors = 0;   // recordings in a row that left tensors behind
  std::string why_again;  // why no program served the last call
  bool has_warned_of_scalars = false;
  bool has_warned_of_memory = false;
  compiler::Recheck recheck;
  bool announces = false;  // all ranks have had a program
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
  /// What it may change: parameters, and all that it may write.
  struct ParallelSubject {
    std::vector<at::Tensor> parameters, written;
  };
  /// One run, undone.
  compiler::Recording record_undone(const StepArguments& given, compiler::StateSnapshot& snapshot,
                                    const ParallelSubject& subject, Run run);
  ParallelRecording record_plain(const StepArguments& given, const ParallelSubject& subject,
                                 Run run);
  void record_probe(const StepArguments& given, const ParallelSubject& subject, Run run,
                    ParallelCall& call);
  /// The program for this call that all ranks have, each for its own part of the batch.
  compiler::Variant* find_common(const compiler::CallShape& shape);
  /// What a program gave, as distributed tensors where the mode says so.
  std::vector<at::Tensor> placed(const compiler::Variant& variant,
                                 std::vector<at::Tensor> results) const;
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
  /// What is watched besides modules, and what earlier recordings reached, as it is now.
  compiler::Guards guards_now() const;
  /// `seconds`: what the recorded call took.
  void take(compiler::CallShape shape, compiler::Recording recording, const StepArguments& given,
            double seconds);
  /// The recording is that of another one before it. The program that was made of it; null if there
  /// was one already.
  compiler::Variant* confirm(compiler::Variant& variant, compiler::CallShape shape,
                             compiler::Recording recording, const StepArguments& given);
  /// Once, when many programs are made that differ by scalars among the arguments alone.
  void warn_of_scalars(const compiler::CallShape& shape);
  std::string objection(const compiler::CallShape& shape, const compiler::Recording& recording,
                        const StepArguments& given) const;
  std::string cause_of_change(const compiler::Recording& recording,
                              const StepArguments& given) const;
  /// A program that would have served the call, but does something else; see Note [recorded again].
  compiler::Variant* find_outdated(const compiler::CallShape& shape,
                                   const compiler::Recording& recording);
  /// Null: that of another rank is. All make theirs anew, so that they go on together.
  void drop_outdated(const compiler::Variant* outdated, const compiler::Recording& recording);
  bool has_no_place(const compiler::CallShape& shape, const compiler::Recording& recording) const;
  void note_eviction();
  void tell_masked(const compiler::Variant& variant);
  compiler::Variant* find_ready(const compiler::CallShape& shape);
  /// Whether some program makes the numbers of its dropout itself.
  bool draws_in_kernels() const;
  /// Whether some ranks draw in kernels what others draw by ATen's operator. Collective.
  bool draws_differ(const compiler::Variant& made) const;
  /// Ready only if all ranks made theirs of this call.
  void agree_on(compiler::Variant* made);
  std::vector<at::Tensor> run(compiler::Variant& variant, const StepArguments& given);
  /// What the call before has left to this one; see LastTrainStep.
  void finish_work();
  std::string why_no_program(const compiler::CallShape& shape) const;
  /// `without`: passes that are left out besides those of the options.
  void make_ready(compiler::Variant& variant, const std::vector<std::string>& without = {});
  void accept(compiler::Variant& variant, Graph graph, const std::vector<Pass>& further,
              const std::vector<std::string>& without = {});
  /// The program of a parallel mode, which sends the same messages on all ranks. Collective.
  void accept_parallel(compiler::Variant& variant, const Graph& graph);
  void note_capture();
  void drop_gradients(const compiler::Recording& recording) const;
};

/// The tensors that an optimizer of ours keeps for its parameters, by parameter and name.
struct OptimizerTensor {
  at::Tensor tensor, parameter;
  std::string name;
};
std::vector<OptimizerTensor> tensors_of(const torch::optim::Optimizer& optimizer);

}  // namespace tessera::detail
