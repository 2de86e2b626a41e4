#pragma once

#include "inspect/subjects.h"

#include <string>

namespace tessera::inspect {

/// A table for people: tensors, dtypes, shapes, sizes, who holds which part, checksums, totals.
std::string to_table(const Subject& subject);
/// The same for programs.
std::string to_json(const Subject& subject);

}  // namespace tessera::inspect
