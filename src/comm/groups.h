#pragma once

#include "comm/context.h"

namespace tessera::comm {

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
