#pragma once

#include <tessera/comm.h>
#include <tessera/serialize/index.h>
#include <tessera/serialize/safetensors.h>
#include <tessera/serialize/torch_file.h>
#include <tessera/state_dict.h>

#include <map>
#include <memory>
#include <string>

/// Checkpoints: a folder with a safetensors file of each rank and an index, written by all ranks at
/// once and loaded on any number of ranks in any layout. See docs/checkpoints.md.
namespace tessera {

/// What a program wants to find again beside tensors (step, position in the data, random state):
/// any bytes by name. Each rank's own.
using Extra = std::map<std::string, std::string>;

struct SaveOptions {
  /// Who saves together. Empty: the default group, or this process alone if there is none.
  Group group = {};
  /// > 0: afterwards, of the checkpoints beside `dir` whose names differ only in the last number,
  /// those older than this many whole ones with the largest numbers are removed.
  int keep_last = 0;
};

/// Writes the module's parameters and persistent buffers, and the optimizer's state, into the
/// folder `dir`; parents are made. Every rank of the group calls it and returns when all is on
/// disk. Nothing is gathered: each rank writes what it holds, each value is written once; buffers
/// that differ between ranks are those of the first rank that holds them. `dir`, the same on all
/// ranks, appears, or replaces an older checkpoint of that name, in one step; a crash at any time
/// leaves the older one whole. An error on one rank is thrown on all ranks, names that rank and
/// leaves `dir` as it was. Not inside of a fully sharded unit's forward or backward.
void save(const std::string& dir, nn::ModuleRef module, const Extra& extra = {},
          SaveOptions options = {});
void save(const std::string& dir, nn::ModuleRef module, const torch::optim::Optimizer& optimizer,
          const Extra& extra = {}, SaveOptions options = {});

/// A save that is still being written. The destructor waits; an error that nobody waited for is
/// told as a warning then, and thrown by the rank's next save.
class PendingSave {
 public:
  PendingSave() = default;
  PendingSave(PendingSave&&) noexcept = default;
  PendingSave& operator=(PendingSave&& other) noexcept;
  ~PendingSave();

  /// Returns when the checkpoint is on disk on all ranks; throws what save() would have. Later
  /// calls return at once.
  void wait();
  bool is_done() const;

  class Impl;
  explicit PendingSave(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

 private:
  std::shared_ptr<Impl> impl_;
};

/// As save, but returns as soon as the values have been copied to host memory; a thread writes
/// them. A save that is still pending is waited for first. Every rank of the group calls it.
PendingSave save_async(const std::string& dir, nn::ModuleRef module, const Extra& extra = {},
                       SaveOptions options = {});
PendingSave save_async(const std::string& dir, nn::ModuleRef module,
                       const torch::optim::Optimizer& optimizer, const Extra& extra = {},
                       SaveOptions options = {});

struct CheckpointLoadOptions {
  /// Who loads together. Empty: the default group, or this process alone if there is none.
  Group group = {};
  /// False: what fits is loaded; tensors that only one side has, or of another shape or dtype, are
  /// skipped, and what the optimizer has for such parameters stays.
  bool strict = true;
};

/// Loads a checkpoint, whatever ranks and layout it was saved from, into a module in any layout.
/// Every rank of the group calls it, with the same folder, and reads only the parts it holds. All
/// is read and verified on all ranks before the first value is changed; an error changes nothing on
/// any rank. dtypes have to be equal. Returns this rank's extra if as many ranks saved as load,
/// otherwise rank 0's.
Extra load(const std::string& dir, nn::ModuleRef module, CheckpointLoadOptions options = {});
/// With the optimizer's options and state, which has to be of the same kind.
Extra load(const std::string& dir, nn::ModuleRef module, torch::optim::Optimizer& optimizer,
           CheckpointLoadOptions options = {});

}  // namespace tessera
