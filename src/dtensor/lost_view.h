#pragma once

#include "dtensor/part.h"

/// Views whose parts had to be moved. See Note [lost views].
namespace tessera::dtensor {

// Note [lost views]
// A view of a distributed tensor is one of the parts wherever these stay where they are. Where they
// had to be moved it has memory of its own: what is written into it would not reach the base, and
// what is written to the base would not reach it. The first is refused; for the second a lost view
// remembers how often its base had been written to, and is refused once that has changed. Writes
// are counted by autograd's version counter, which views share, and by the part, which .data()
// shares.

/// Marks a view that an operator has made of `base`, which may be lost itself.
void mark_lost(const at::Tensor& view, const at::Tensor& base);

/// Of a distributed tensor: throws if it is a lost view, and what it was taken from has changed.
void refuse_stale(const char* caller, const Part& part);
inline void check_fresh(const char* caller, const at::Tensor& tensor) {
  if (const auto& part = part_of(tensor); part.is_lost_view) refuse_stale(caller, part);
}
/// Before it is written to: throws if it is a lost view, lets those taken from it know, and waits
/// for other ranks that may read the memory.
void begin_write(const char* caller, const at::Tensor& tensor);

}  // namespace tessera::dtensor
