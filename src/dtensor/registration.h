#pragma once

namespace tessera::dtensor {

/// Takes the dispatch key PrivateUse3 and puts the kernel of distributed tensors behind every
/// operator; once. Throws if something else in the process has taken the key.
void ensure_registered();

}  // namespace tessera::dtensor
