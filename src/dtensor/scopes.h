#pragma once

#include <ATen/core/function_schema.h>

/// What the scopes of dtensor/tools.h have switched for this thread.
namespace tessera::dtensor {

bool replicates_implicitly();
/// One warning per operator, or an error inside StrictSharding.
void note_missing_rule(const c10::FunctionSchema& schema);

}  // namespace tessera::dtensor
