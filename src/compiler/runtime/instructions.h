#pragma once

#include <tessera/compile/graph.h>

#include <string>

namespace tessera::compiler {

/// A product of matrices, what reduces it over ranks, and the update of the weight whose gradient
/// that is: run together, by blocks of rows. See Note [update early].
struct RowUpdate {
  size_t update;               // the instruction
  ValueId gradient;            // that it reads
  bool is_kept = true;         // somebody needs the gradient afterwards
  std::string group = {};      // in which it is reduced; empty: it is not
  c10::IValue reduction = {};  // "avg" ...
  int64_t parts = 1;           // in how many the rows are cut, one for each rank
  bool scatters = false;
};

}  // namespace tessera::compiler
