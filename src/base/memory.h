#pragma once

#include <cstddef>

namespace tessera {

/// memcpy for what is read next, by this rank or another: stays in the cache.
void copy_to_cache(void* to, const void* from, size_t bytes);
/// memcpy for what will not be read soon: leaves the cache to others, and does not fetch what is
/// written over.
void copy_past_cache(void* to, const void* from, size_t bytes);

/// Tells the C library to keep large freed blocks instead of returning them to the system:
/// gradients and activations of every step would otherwise be mapped, cleared and faulted in again.
/// Done once per process, unless MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ or GLIBC_TUNABLES
/// say what the user wants, or allow_warm_memory(false) was the last word.
void keep_memory_warm();
/// Of the process, by InitOptions::keep_freed_memory.
void allow_warm_memory(bool allows);

}  // namespace tessera
