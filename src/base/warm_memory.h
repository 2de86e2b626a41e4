#pragma once

namespace tessera {

/// Tells the C library to keep large freed blocks instead of returning them to the system:
/// gradients and activations of every step would otherwise be mapped, cleared and faulted in again.
/// Done once per process, unless MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ or GLIBC_TUNABLES
/// say what the user wants.
void keep_memory_warm();

}  // namespace tessera
