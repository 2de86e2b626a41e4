#pragma once

#include <tessera/compile/compiler.h>

#include "compiler/agreement.h"
#include "compiler/lazy/follower.h"

#include <c10/util/FunctionRef.h>

#include <map>
#include <memory>
#include <mutex>

namespace tessera::compiler {

/// Code that is run at every call, and whose operators are run as one program at its end.
///
/// Note [following]: the code runs each time, so whatever it does besides operators happens, and
/// autograd writes its graph. Its operators are compared with those of earlier runs, one by one; as
/// long as they are the same, tensors without memory take the place of results. When the code has
/// come to its end, the program computes every tensor that somebody still holds: results, what
/// autograd saved, gradients. When an operator comes that was not expected, what was put off is
/// run, and the rest as it comes; the next run of this kind finds its program. Where somebody needs
/// values before the end (replicate's engine, with optimize_ddp = "ddp_optimizer"), the code is
/// cut: what came so far is one program, what follows another.
class Region {
 public:
  struct Options {
    std::string name;  // in messages: "compile(Net)"
    GraphCompiler compiler;
    bool fullgraph = false;
    size_t most_paths = 8;
    bool tries_again = false;  // after failures: it serves different code at different times
  };
  explicit Region(Options options) : options_(std::move(options)) {}

  /// Ranks that communicate in it run it together; one that does not may run it alone.
  void run(c10::function_ref<void()> body);

  std::string explain() const;

 private:
  struct Compiled {
    Path path;
    Executable executable;
  };
  struct Run;
  struct Failures {
    static constexpr int kMost = 8;
    int in_a_row = 0;
    int rested = 0;
    bool rest();
    void forget() { in_a_row = 0; }
  };

  std::vector<const Path*> paths() const;
  void cut(Run& run);
  void finish(Run& run);
  void learn(Run& run);
  std::string learn_together(Run& run);
  void fall_back(const std::string& why);

  const Options options_;
  std::recursive_mutex mutex_;  // threads take turns
  std::vector<std::unique_ptr<Compiled>> known_;
  Agreement agreement_;
  std::vector<std::string> log_;
  std::string why_eager_;
  Failures failures_;  // the same on all ranks
  /// Of runs without messages, of which other ranks don't know: it rests without leaving them
  /// alone.
  Failures own_failures_;
};

}  // namespace tessera::compiler
