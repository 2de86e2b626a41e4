#pragma once

#include "comm/context.h"

#include <chrono>
#include <string>
#include <vector>

namespace tessera::comm {

/// One call of new_group: the `count`-th of this list on this rank, from 0.
struct GroupCall {
  std::vector<int> ranks;  // of the world
  int count = 0;
};

/// "ranks 0,1 #2": keeps groups apart in the store and tells them apart in errors.
std::string name_of(const GroupCall& call);

/// Returns when all listed ranks have made this call, at most after `timeout`. Throws on all of
/// them at once, naming both lists, if two wait for each other with different ones.
void meet_for_group(Context& context, const GroupCall& call, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
