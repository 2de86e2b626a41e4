#pragma once

#include "adopt/names.h"
#include "adopt/outline.h"
#include "adopt/tokens.h"

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::adopt {

struct ClassFacts {
  int line = 0;
  bool is_struct = false;
  bool is_final = false;
  int forwards = 0;              // functions of that name
  int alternative_forwards = 0;  // behind an #else
  bool has_template = false;     // among them
  bool has_private = false;
  bool has_reference = false;  // returned
  std::vector<std::vector<std::string_view>> bases = {};
};

/// A line TORCH_MODULE(name) or its like.
struct ModuleLine {
  std::string macro;  // TORCH_MODULE, TORCH_MODULE_IMPL or TESSERA_MODULE
  std::string impl;   // the class
  bool has_default_impl = false;
  /// Why it can't become TESSERA_MODULE; empty: it can, or is one.
  std::string obstacle = {};
};

/// What other files, and later lines, have to know of a file.
struct Outline {
  std::vector<Fact> facts = {};
  std::map<std::string, ClassFacts, std::less<>> classes = {};
  std::map<std::string, ModuleLine, std::less<>> modules = {};  // by name
  /// Names of torch::nn that the file gives to something of its own.
  std::set<std::string, std::less<>> own_names = {};
};

Outline outline_of(const std::vector<Token>& tokens);

/// Why TESSERA_MODULE would not take the class; empty if it would, as far as one can see.
std::string obstacle_of(const std::string& name, const ClassFacts& facts);

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
