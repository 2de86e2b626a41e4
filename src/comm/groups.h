#pragma once

#include "comm/context.h"

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
void rendezvous_for_group(Context& context, const GroupCall& call,
                          std::chrono::milliseconds timeout);

/// Makes a group of these world ranks under a name all of them share. Collective over them.
Group make_group(Context& context, const std::vector<int>& ranks, const std::string& name,
                 const GroupOptions& options);
/// The processes of these world ranks, as far as they can be watched.
Processes processes_of(const World& world, const std::vector<int>& ranks);
/// Says that end_group() follows and what it may wait for, until `deadline`. Returns at once.
void begin_end(const Group& group, std::chrono::steady_clock::time_point deadline);
/// Ends a group: its backends complete what is queued and leave.
void end_group(const Group& group);

}  // namespace tessera::comm
