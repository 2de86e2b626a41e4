#pragma once

#include <cstddef>

namespace tessera {

/// memcpy for what is read next, by this rank or another: stays in the cache.
void copy_to_cache(void* to, const void* from, size_t bytes);
/// memcpy for what will not be read soon: leaves the cache to others, and does not fetch what is
/// written over.
void copy_past_cache(void* to, const void* from, size_t bytes);

}  // namespace tessera
