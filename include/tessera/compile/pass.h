#pragma once

#include <tessera/compile/graph.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera {

/// Rewrites a graph into another that computes the same.
struct Pass {
  std::string name;
  std::function<void(Graph&)> run;
  /// Names of passes that must come before it, where a list has them.
  std::vector<std::string> after = {};
  /// Names of passes without which it can't be: they must come before it.
  std::vector<std::string> needs = {};
  bool once = false;  // a list has it once at most
};

/// What the compiler did, by name: "graphs", "recaptures", "ddp_buckets" (of the last graph),
/// "fused_kernels" ... Of this thread.
std::map<std::string, int64_t>& counters();

}  // namespace tessera
