#include "compiler/programs/program_cache.h"

#include <tessera/compile/pass.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace tessera::compiler {

void Reasons::note_once(const std::string& line) {
  if (std::ranges::find(lines_, line) == lines_.end()) note(line);
}

void Reasons::fall_back(const std::string& why) {
  why_eager_ = why;
  note("runs eagerly: " + why);
  ++counters()["fallbacks"];
  require_program();
  TORCH_WARN(caller_, ": ", subject_, " runs eagerly, since ", why);
}

void Reasons::require_program() const {
  TORCH_CHECK(!fullgraph_ || why_eager_.empty(), caller_, ": expected ", subject_,
              " to be compiled as a whole (fullgraph), but ", why_eager_);
}

std::string Reasons::text() const {
  std::string text;
  for (const auto& line : lines_) text += line + "\n";
  return text;
}

void note_dropped(Reasons& reasons, size_t of) {
  reasons.note(c10::str("dropped: the least recently used of ", of, " programs"));
  ++counters()["evictions"];
}

}  // namespace tessera::compiler
