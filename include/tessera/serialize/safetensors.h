#pragma once

#include <tessera/comm.h>
#include <tessera/state_dict.h>

#include <string>

/// Plain safetensors files, as Python's `safetensors` reads and writes them.
namespace tessera {

/// All tensors of a file, on the CPU, in the order of their names in it; or those of several files,
/// given their index ("….index.json") or the folder they lie in as model.safetensors. Checks whole
/// headers before it reads a tensor; throws a ValueError that names file and tensor.
StateDict read_safetensors(const std::string& file);

/// Writes plain tensors (copied to the CPU, made contiguous) and replaces `file` in one step: a
/// crash leaves the old one. Not collective.
void write_safetensors(const std::string& file, const StateDict& tensors);

/// The whole model, as state_dict of the model that is not parallel would be, in one file that rank
/// 0 of the group writes. Every rank of the group, and of the module's meshes, calls it. An empty
/// group: the default group, or this process alone if there is none.
void export_safetensors(const std::string& file, nn::ModuleRef module, Group group = {});

/// Loads such a file, or any that read_safetensors takes of the module's names and shapes, into a
/// module that is parallel in any way. Every rank reads only what it holds. Strict: one error lists
/// all that differ and nothing is changed. Not collective: a rank that fails fails alone.
LoadReport import_safetensors(const std::string& file, nn::ModuleRef module,
                              LoadOptions options = {});

}  // namespace tessera
