#pragma once

#include "adopt/outline.h"

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace tessera::adopt {

/// Replaces `length` bytes of a text from `offset` on.
struct Edit {
  std::size_t offset = 0;
  std::size_t length = 0;
  std::string text;
};

/// What stays as it is, and why.
struct Note {
  int line = 0;
  bool needs_hand = false;  // somebody has to look at it
  std::vector<std::string> names = {};
  std::string reason = {};
  int places = 0;
};

struct Rewrite {
  std::vector<Edit> edits = {};  // in the order of the text, apart from each other
  std::vector<Note> notes = {};
};

/// The source with hookable modules, without the #include they need. Reads the files that it
/// includes for what names mean. is_holder: whether some file makes a holder of this Impl class.
Rewrite rewrite(const Source& source, const std::function<bool(const std::string&)>& is_holder);

/// The line that includes tessera/nn.h, before the first #include of libtorch, else behind the last
/// one, else behind #pragma once or the comment at the top.
Edit include_edit(const Source& source);

std::string apply_edits(const std::string& text, const std::vector<Edit>& edits);

}  // namespace tessera::adopt
