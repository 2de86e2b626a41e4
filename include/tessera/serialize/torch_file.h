#pragma once

#include <tessera/serialize/index.h>
#include <tessera/state_dict.h>

#include <string>

/// Files of Python's `torch.save`: state dicts, and dicts that have them. Read by a reader of our
/// own, which makes tensors, dicts, lists, tuples, strings and numbers, and runs nothing; whatever
/// else is in a file makes it refused, as `torch.load(weights_only=True)` would. Files of PyTorch
/// 1.6 or newer.
namespace tessera {

struct ReadTorchOptions {
  /// Of the dict that has the tensors, for files such as {"model": …, "epoch": 3}: "model", or
  /// "ema/model" for one in another. Empty: the file's own.
  std::string key = {};
};

/// All tensors of `torch.save(model.state_dict(), file)`, on the CPU wherever they were saved from,
/// in the dict's order; parameters as plain values. Tensors that shared memory share it again, and
/// views keep their strides. Verifies the checksum of all that it reads; throws a ValueError that
/// names file and tensor.
StateDict read_torch(const std::string& file, ReadTorchOptions options = {});

struct ImportTorchOptions {
  std::string key = {};  // as for read_torch
  bool strict = true;
};

/// Loads such a file into a module that is parallel in any way, as import_safetensors does: each
/// rank keeps what it holds and reads one storage after the other. Dtypes are converted. Strict:
/// one error lists all that differ and nothing is changed. Not collective.
LoadReport import_torch(const std::string& file, nn::ModuleRef module,
                        ImportTorchOptions options = {});

/// The optimizer's part of `torch.save({"model": …, "optimizer": optimizer.state_dict()}, file)`:
/// loads what Python's optimizer of the same class and parameters, in the same groups and order,
/// kept. Otherwise a ValueError, and nothing is changed. Every rank calls it if the module is
/// sharded.
void import_torch_optimizer(const std::string& file, nn::ModuleRef module,
                            torch::optim::Optimizer& optimizer, ReadTorchOptions options = {});

/// What lies in such a file, for tools: tensors in nested dicts and lists by path,
/// "model/up.weight".
CheckpointIndex read_torch_index(const std::string& file);

/// Reads every storage of such a file and compares checksums; throws a ValueError that names it.
void verify_torch(const std::string& file);

}  // namespace tessera
