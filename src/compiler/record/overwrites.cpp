#include "compiler/record/overwrites.h"

#include "compiler/ir/operators.h"

namespace tessera::compiler {
bool overwrites(const c10::FunctionSchema& schema, size_t argument) {
  if (schema.arguments()[argument].kwarg_only()) return true;  // out=
  return argument == 0 && overwrites_first(schema);
}

}  // namespace tessera::compiler
