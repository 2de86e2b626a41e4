#pragma once

#include <tessera/compile/graph.h>

#include "base/capture.h"
#include "compiler/trace/memory.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

namespace tessera::compiler {

/// On what a recording depends: it holds while `read` returns `expected`.
struct Dependency {
  std::string what;
  std::function<uint64_t()> read;
  uint64_t expected;
};

struct VaryingScalar {
  std::string name;
  std::function<double()> read;
};

/// Writes down the operators that come to it, and runs them. What it has written computes the same
/// from the same inputs, without the code that issued the operators.
class Recorder final : public capture::Observer {
 public:
  Recorder();

  /// The one whose scope is open in this thread.
  static Recorder* current();

  /// Operators and notes of this thread come to `recorder`, while it lives.
  class Scope;

  void record(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  void depend_on(std::string what, std::function<uint64_t()> read) override;
  void vary(const std::string& name, const std::string& argument, double factor,
            std::function<double()> read) override;
  void end_vary() override { pending_.pop_back(); }
  void give_up(const std::string& why) override;

  Graph& graph() { return graph_; }
  Memory& memory() { return memory_; }
  const std::vector<Dependency>& dependencies() const { return dependencies_; }
  const std::vector<VaryingScalar>& scalars() const { return scalars_; }
  /// Why it can't be run; empty if it can.
  const std::string& broken() const { return broken_; }

 private:
  struct Call;
  struct Pending {
    std::string argument;
    size_t scalar;
    double factor;
    double value;
  };

  void before(Call& call);
  void after(Call& call);
  Argument argument(Call& call, size_t index);
  Argument number(const std::string& name, const c10::IValue& value) const;
  bool make_functional(const Call& call, Node& node);
  void write_results(Call& call, Node& node, std::vector<Node>& before);
  void store_written(const Call& call);
  void own_results(Call& call, Node& node);

  Graph graph_;
  std::shared_ptr<Births> births_;
  Memory memory_;
  std::vector<Dependency> dependencies_;
  std::vector<VaryingScalar> scalars_;
  std::vector<Pending> pending_;
  std::string broken_;
};

class Recorder::Scope {
 public:
  explicit Scope(Recorder& recorder);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  struct Guards;
  std::unique_ptr<Guards> guards_;
};

}  // namespace tessera::compiler
