#pragma once

#include <tessera/compile/compiler.h>

#include "compiler/programs/program_cache.h"
#include "compiler/record/trace.h"

#include <c10/util/FunctionRef.h>

#include <mutex>

namespace tessera::compiler {

/// Code that is run at every call, and whose operators are run as one program at its end.
///
/// Note [traces]: the code runs each time, so whatever it does besides operators happens, and
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
    std::string caller, subject;  // in messages: "compile(Net)", "its forward"
    GraphCompiler compiler;
    bool fullgraph = false;
    size_t max_programs = 8;
    bool tries_again = false;  // after failures: it serves different code at different times
  };
  explicit Region(Options options)
      : options_(std::move(options)),
        known_({options_.caller, options_.subject, options_.fullgraph}, options_.max_programs) {}

  /// Ranks that communicate in it run it together; one that does not may run it alone.
  void run(c10::function_ref<void()> body);

  std::string explain() const { return known_.reasons.text(); }

 private:
  struct Compiled {
    Trace trace;
    Executable executable;
    bool communicates = false;
    uint64_t last_use = 0;
    bool is_shared() const { return communicates; }
  };
  struct Run;
  struct Failures {
    static constexpr int kMost = 8;
    int in_a_row = 0;
    int rested = 0;
    bool rest();
    void forget() { in_a_row = 0; }
  };

  std::vector<const Trace*> traces() const;
  void cut(Run& run);
  void finish(Run& run);
  Compiled& learn(Run& run);
  std::string learn_together(Run& run, bool is_known);

  const Options options_;
  std::recursive_mutex mutex_;  // threads take turns
  ProgramCache<Compiled> known_;
  Failures failures_;  // the same on all ranks
  /// Of runs without messages, of which other ranks don't know: it rests without leaving them
  /// alone.
  Failures own_failures_;
};

}  // namespace tessera::compiler
