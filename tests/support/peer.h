#pragma once

#include "support/subprocess.h"

#include <ATen/core/Tensor.h>

#include <chrono>
#include <map>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

/// PyTorch itself as the other side of a test.
namespace tessera::testing {

using Tensors = std::map<std::string, at::Tensor>;

struct PeerOptions {
  std::chrono::milliseconds deadline = std::chrono::seconds(120);
  std::map<std::string, std::optional<std::string>> environment = {};
};

struct PeerResult {
  ExitStatus status;
  bool timed_out = false;
  std::string output;  // what the script printed
  Tensors tensors;     // the script's `outputs`

  bool ok() const { return status.ok() && !timed_out; }
  /// The output of this name; throws if the script left none.
  const at::Tensor& operator[](const std::string& name) const { return tensors.at(name); }
};

/// Why there is no Python with the torch version this binary was built against; none: there is one.
/// At the start of a test: if (auto reason = peer_missing()) GTEST_SKIP() << *reason; The Python is
/// $TESSERA_PYTHON, or the repository's .venv/bin/python, or else python3.
std::optional<std::string> peer_missing();

/// Runs a Python script (its text, or the path of a file) that finds `torch`, `inputs` (name ->
/// tensor), `rank` and `world_size`, and leaves its results in `outputs`. One thread, seed 1234.
/// Bits survive both ways. A script that fails or exceeds the deadline is a failure of the calling
/// line, with its output.
PeerResult run_peer(const std::string& script, const Tensors& inputs = {}, PeerOptions options = {},
                    std::source_location where = std::source_location::current());

/// As above in n processes, which also find RANK, WORLD_SIZE, LOCAL_RANK and
/// init_process_group(backend="gloo"): a world over a file store. Results by rank.
std::vector<PeerResult> run_peers(int n, const std::string& script, const Tensors& inputs = {},
                                  PeerOptions options = {},
                                  std::source_location where = std::source_location::current());

}  // namespace tessera::testing
