#pragma once

#include <tessera/compile/graph.h>

#include "compiler/ir/cursor.h"

#include <ATen/core/function_schema.h>

#include <functional>

namespace tessera::compiler {

/// What Graph::parse knows while it reads a node: the values that may be used.
struct Known {
  std::function<bool(ValueId)> is_defined;
};

/// An argument in text and whether its values are marked as consumed.
struct ParsedArgument {
  Argument argument;
  bool marked = false;
};

/// `declared` decides what names and empty lists mean; null: of a fused node, which has no schema.
ParsedArgument parse_argument(Cursor& cursor, const c10::Argument* declared, const Known& known);
/// "%3", "_"; must be defined.
ValueId parse_use(Cursor& cursor, const Known& known);
/// "%3" without further checks.
ValueId parse_value_number(Cursor& cursor);

}  // namespace tessera::compiler
