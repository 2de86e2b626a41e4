#pragma once

#include "dtensor/part.h"
#include "dtensor/path.h"

namespace tessera::dtensor {

/// Moves a part from placements to placements. `path` leads from `from.placements`; `sizes` are
/// global. The result may share memory with `local`.
at::Tensor run_path(const Path& path, at::Tensor local, const Spec& from, c10::IntArrayRef sizes);
/// The same, but returns when the last collective is under way; the function waits for it.
std::function<at::Tensor()> start_path(const Path& path, const at::Tensor& local, const Spec& from,
                                       c10::IntArrayRef sizes);

/// The cheapest way; throws, naming `caller`, if there is none.
Path require_path(const char* caller, const Spec& from, const Spec& to, c10::IntArrayRef sizes,
                  int64_t item_bytes);

/// A distributed tensor placed otherwise, without autograd; itself if nothing changes.
at::Tensor redistributed(const char* caller, const at::Tensor& tensor, const SpecPtr& to);

}  // namespace tessera::dtensor
