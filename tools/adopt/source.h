#pragma once

#include "adopt/outline.h"
#include "adopt/tokens.h"

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace tessera::adopt {

/// A file and what was found in it.
struct Source {
  std::string name;            // as the user gave it
  std::filesystem::path path;  // without links
  bool is_given = false;       // may be changed; else it is read as others include it
  std::string text = {};
  std::vector<Token> tokens = {};                      // of text
  Outline outline = {};                                // of the tokens
  std::map<std::size_t, const Source*> includes = {};  // by the token of the #include
};

/// The source and all that it includes, each once.
std::set<const Source*> closure_of(const Source& source);

}  // namespace tessera::adopt
