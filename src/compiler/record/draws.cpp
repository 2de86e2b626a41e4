#include "compiler/record/draws.h"

#include "compiler/record/memory.h"

#include <algorithm>

namespace tessera::compiler {

std::optional<std::vector<Argument>> Draws::drawn_before(const std::string& op) {
  const auto open =
      std::find_if(open_.rbegin(), open_.rend(), [](const Open& part) { return part.again; });
  if (open == open_.rend()) return std::nullopt;
  const auto& draws = known_[open->part];
  if (open->next >= draws.size() || draws[open->next].op != op)
    throw CannotRecord(op +
                       " draws random numbers in a checkpointed part that is computed again, "
                       "where its forward drew none that were recorded");
  return draws[open->next++].results;
}

void Draws::add(const std::string& op, const std::vector<Argument>& results) {
  for (const auto& part : open_) {
    if (!part.again) known_[part.part].push_back({op, results});
  }
}

}  // namespace tessera::compiler
