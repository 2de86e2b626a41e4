#pragma once

#include "compiler/passes/replace_random.h"
#include "compiler/programs/call_guards.h"
#include "compiler/record/recording.h"
#include "compiler/runtime/split_program.h"

#include <c10/util/FunctionRef.h>

#include <memory>
#include <optional>

namespace tessera::compiler {

/// One program of a function, for one kind of call.
class Variant {
 public:
  Variant(CallShape shape, Recording recording, const detail::StepArguments& given);

  std::shared_ptr<const void> form;  // what the function returned, without tensors
  std::optional<ParallelCall> parallel = std::nullopt;  // that it was made for, in a parallel mode
  uint64_t last_use = 0;
  bool is_shared() const { return true; }  // see ProgramCache

  /// Why it can't serve this call; empty if it can.
  std::string guard_failure(const CallShape& shape) const;
  /// The same, but for which gradients exist, while a call is recorded or has been.
  std::string guard_failure_besides_gradients(const CallShape& shape) const;
  /// A call is about to be recorded: what the function changes must not tell its recording apart.
  void note_start(const CallShape& shape);
  /// Whether, when the last recorded call began, this could have served it.
  bool could_serve() const { return could_serve_; }

  /// Whether this recording, of a call of this shape, is the variant's.
  bool matches(const CallShape& shape, const Recording& recording) const;

  const CallShape& shape() const { return shape_; }
  const Recording& recording() const { return recording_; }
  bool is_ready() const { return program_ != nullptr; }
  /// See Program.
  std::string why_not_replayed() const { return is_ready() ? program_->why_not_replayed() : ""; }
  void release_memory() { program_->release_memory(); }
  /// Makes it ready: two recordings gave the same graph, of which this is the program; `kernels` as
  /// for Program.
  void accept(Graph graph, std::vector<Launch> kernels);
  /// Other ranks have none of this call: it is not ready any more, and may be made again.
  void withdraw() {
    program_.reset();
    split_.reset();
  }
  /// It clears gradients before it makes its own: those present before a call don't matter.
  void ignore_gradients() { ignores_gradients_ = true; }
  /// Of another recording that matches: whether it clears gradients of parameters it does not use.
  void learn_unused(const Recording& recording);
  /// Of another recording that matches: which bytes the function itself changes. True if these are
  /// more than were known.
  bool learn_masks(Guards guards) { return recording_.guards.merge(std::move(guards)); }
  /// There is this parameter, too, of which nothing is known if the recording does not use it.
  void notice(const at::Tensor& parameter);
  const Graph& graph() const { return graph_; }
  const std::vector<Launch>& kernels() const { return kernels_; }
  /// Names what the program sends to other ranks; see Agreement.
  int64_t messages() const { return messages_; }
  /// What ranks tell each other of the run that comes: its messages, and which of its graphs.
  int64_t announced() const { return messages_ + program_->captures(); }
  void name_messages(int64_t name) { messages_ = name; }
  DrawnBy drawn_by() const { return drawn_by_; }

  std::vector<at::Tensor> run(const detail::StepArguments& given);
  /// Whether a call may leave work for the next one; see Note [next iteration].
  bool can_leave_work() const { return split_ != nullptr; }
  bool has_left_work() const { return can_leave_work() && split_->has_begun(); }
  void finish_work();

 private:
  /// What a tensor of the program is to the caller.
  struct Place {
    int argument = -1;  // which tensor argument
    int owner = -1;     // whose gradient, among recording_.gradients
  };
  struct Target {
    OutputKind kind;
    int input = -1;            // that is written
    int owner = -1;            // whose gradient it becomes
    bool is_constant = false;  // a result that is the program's own
    int alias = -1;            // a result that is an input's memory: which of recording_.aliases
  };

  std::string guard_failure_besides_bytes(const CallShape& shape) const;
  bool reads_gradient(size_t owner) const;
  std::string changed_gradients() const;
  std::string changed_inputs() const;
  void drop_gradients() const;
  std::vector<at::Tensor> gather_inputs(const detail::StepArguments& given) const;
  /// `is_here`: whether this output, by number, is among the values.
  std::vector<at::Tensor> place_outputs(std::vector<at::Tensor> values,
                                        const std::vector<at::Tensor>& inputs,
                                        c10::function_ref<bool(size_t)> is_here);

  CallShape shape_;
  Recording recording_;
  bool ignores_gradients_ = false;
  std::string changed_at_start_;  // what had changed when the last recorded call began
  bool could_serve_ = false;
  std::vector<Place> places_;       // by input
  std::vector<uint64_t> hooks_;     // by owner of a gradient: what tells its hooks apart
  std::vector<bool> needed_grads_;  // by input that is not an argument: whether it required one
  std::unique_ptr<Program> program_;
  std::unique_ptr<SplitProgram> split_;  // the same in two parts, if it can be
  Graph graph_;                          // as the program runs it
  std::vector<Launch> kernels_;          // of it, by node
  int64_t messages_ = 0;
  DrawnBy drawn_by_ = DrawnBy::Nobody;
  std::vector<Target> targets_;  // by output
};

}  // namespace tessera::compiler
