#pragma once

#include <tessera/compile/graph.h>

#include "base/capture.h"
#include "compiler/record/guards.h"
#include "compiler/record/memory.h"
#include "compiler/record/random.h"
#include "compiler/record/trace.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace tessera::compiler {

/// Writes down the operators that come to it, and runs them. What it has written computes the same
/// from the same inputs, without the code that issued the operators.
class Recorder final : public capture::Observer {
 public:
  /// With a matcher, operators are not run as long as it serves them.
  explicit Recorder(Inputs inputs = Inputs::ByTensor, TraceMatcher* matcher = nullptr);

  /// The one whose scope is open in this thread.
  static Recorder* current();
  /// Operators and notes of this thread come to `recorder`, while it lives.
  class Scope;
  void record(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  void depend_on(const void* who, std::string what, std::function<uint64_t()> read) override;
  void hyperparameter(const void* who, std::string name,
                      const std::shared_ptr<capture::HostNumber>& number,
                      std::function<double()> read) override;
  void begin_random(const void* who, bool again) override;
  void end_random() override;
  bool watches_modules() const override { return is_whole_; }
  void enter_module(const torch::nn::Module& module, std::function<uint64_t()> read) override;
  void leave_module() override { entered_.pop_back(); }
  bool takes_averages() const override;
  void size_buckets(int64_t first, int64_t later) override {
    bucket_caps_ = BucketCaps{first, later};
  }
  bool cuts_at_buckets() const override;
  void cut() override;
  void note_parameters(const std::vector<at::Tensor>& parameters) override;
  void before_run(const void* who, std::function<void()> action) override;
  void at_end(const void* who, std::function<std::string()> objection) override;
  void before_hidden_message() override;
  void give_up(const std::string& why) override;

  void ask_at_end();                       // those who want to be asked; breaks off if one objects
  void break_off(const std::string& why);  // from here on operators run, unrecorded
  void check_generator();                  // breaks off if somebody has set the random generator
  /// Called before a message is sent that is not put off, and before those that are not seen;
  /// before one that is no part of the recording.
  void before_sending(std::function<void()> told) { before_sending_ = std::move(told); }
  void before_hidden(std::function<void()> told) { before_hidden_ = std::move(told); }
  /// Called when what was recorded so far is to be a program by itself; then restart().
  void at_cuts(std::function<void()> told) { cut_ = std::move(told); }
  void restart(TraceMatcher* matcher);  // forgets what was recorded, of which all has run
  /// From here on operators run, and are recorded; what was put off has run.
  void stop_matching();
  /// Modules below `root` are called by their paths there.
  void name_modules(const torch::nn::Module& root);
  /// The recording depends on it and on all below; see Note [objects by their bytes].
  void watch_module(const torch::nn::Module& module);
  /// Backends may hold what they sent a moment longer than those who waited for it: asks them to
  /// let go, so that what is held now is held by the function's caller.
  void settle() const;
  Graph& graph() { return graph_; }
  const std::vector<RecordedCall>& calls() const { return calls_; }  // all that came, in order
  /// Names of the groups in which it communicates, also if it can't be run.
  const std::vector<std::string>& groups() const { return groups_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }  // of optimizers
  const std::vector<at::Tensor>& module_parameters() const { return module_parameters_; }
  /// Generators that operators were given, as they were before.
  const auto& generators() const { return generators_; }
  Memory& memory() { return memory_; }
  Allocations& allocations() { return allocations_; }
  Guards& guards() { return guards_; }
  /// What the function does to modules is as it was when it began; those that it made are gone.
  void end_modules();
  const std::vector<Dependency>& dependencies() const { return dependencies_; }
  const std::vector<Hyperparameter>& hyperparameters() const { return hyperparameters_; }
  const std::vector<FirstAction>& first_actions() const { return first_actions_; }
  /// Why it can't be run; empty if it can.
  const std::string& broken() const { return broken_; }

 private:
  struct Call;

  void note_group(const c10::FunctionSchema& schema, const torch::jit::Stack& stack);
  void note_generator(at::Generator generator);
  void number_messages(Node& node);
  void run(Call& call);
  void before(Call& call);
  std::string with_place(const CannotRecord& why) const;  // for a message
  void after(Call& call);
  Argument argument(Call& call, size_t index);
  bool make_functional(const Call& call, Node& node);
  void write_results(Call& call, Node& node, std::vector<Node>& before);
  std::vector<Node> repeat_draw(const Node& node);
  void store_written(const Call& call, const std::vector<Argument>& results);
  void own_results(Call& call, Node& node);

  std::recursive_mutex mutex_;  // on a GPU, two threads may run parts of a backward
  TraceMatcher* matcher_;
  std::function<void()> before_sending_, before_hidden_, cut_;
  std::vector<RecordedCall> calls_;
  std::vector<std::string> groups_;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;
  std::unordered_map<std::string, int64_t> next_messages_;  // by group
  Graph graph_;
  Allocations allocations_;
  Memory memory_;
  std::vector<Dependency> dependencies_;
  Guards guards_;
  std::vector<at::Tensor> parameters_, module_parameters_;
  std::vector<Hyperparameter> hyperparameters_;
  std::vector<FirstAction> first_actions_;
  std::map<const void*, std::function<std::string()>> objections_;
  std::string broken_;
  std::optional<BucketCaps> bucket_caps_;
  const bool is_whole_;  // forward and backward come to it
  Draws draws_;
  GeneratorWatch generator_;
  std::unordered_map<const torch::nn::Module*, std::string> paths_;
  std::vector<const std::string*> entered_;  // paths of modules whose forwards are under way
};

class Recorder::Scope {
 public:
  explicit Scope(Recorder& recorder);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  struct Guards;
  Recorder& recorder_;
  std::unique_ptr<Guards> guards_;
};

}  // namespace tessera::compiler
