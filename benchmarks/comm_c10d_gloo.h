#pragma once

#include <tessera/comm.h>

namespace tessera::benchmarks {

/// libtorch's own gloo over all ranks, which stages CUDA tensors by itself; nothing of ours but the
/// store. Every rank calls it, after init().
Group make_c10d_gloo();

}  // namespace tessera::benchmarks
