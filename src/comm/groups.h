#pragma once

#include "comm/context.h"

namespace tessera::comm {

/// Makes a group of these world ranks under a name all of them share. Collective over them.
Group make_group(Context& context, const std::vector<int>& ranks, const std::string& name,
                 const GroupOptions& options);
/// Ends a group: its backends complete what is queued and leave.
void end_group(const Group& group);

}  // namespace tessera::comm
