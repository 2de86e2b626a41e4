#pragma once

#include <cstddef>

namespace tessera::comm::shm {

/// memcpy for what is read next, by this rank or another: stays in the cache.
void copy_to_cache(void* to, const void* from, size_t bytes);
/// memcpy for what will not be read soon: does not fetch the destination into the cache first.
void copy_past_cache(void* to, const void* from, size_t bytes);
/// Into memory that other ranks read next: in cache or past it, whichever has been faster lately.
void copy_for_peers(void* to, const void* from, size_t bytes);

}  // namespace tessera::comm::shm
