#pragma once

#include <map>
#include <string>
#include <vector>

namespace tessera::test {

/// A program of several files, by name.
using Files = std::map<std::string, std::string>;

struct Adopted {
  Files files;                           // as they would be written
  std::vector<std::string> left = {};    // "line name, name: reason", what needs a hand
  std::vector<std::string> stays = {};   // what need not
  std::vector<std::string> errors = {};  // "file:line: reason"
  std::vector<std::string> also = {};    // files that were not named
};

/// What `tessera adopt` makes of the files; all are named, or those in `given`. Expects that a
/// second run changes nothing more.
Adopted adopt_files(const Files& files, const std::vector<std::string>& given = {});

/// Of one file, without the #include that is added.
std::string adopted(const std::string& text);

/// Of one file: what needs a hand.
std::vector<std::string> left(const std::string& text);

}  // namespace tessera::test
