#pragma once

#include <string>
#include <vector>

namespace tessera::data {

struct FoundText {
  std::string path;  // to open it by
  std::string name;  // inside of the folder that was named: the same wherever that folder lies
};

/// What was not taken, and why: for the message when nothing is left.
struct LeftOut {
  int hidden = 0;    // and `build`, `runs`, `node_modules`
  int not_text = 0;  // a zero byte
  int empty = 0;
  int no_file = 0;  // links to folders or to nothing, sockets, devices
  std::string text() const;
};

struct FoundTexts {
  std::vector<FoundText> files;  // as the paths came; those of a folder by name; each file once
  LeftOut left_out;
};

/// The files, and the text files in the folders. Throws a ValueError that names the path if it is
/// missing or can't be read.
FoundTexts find_texts(const std::vector<std::string>& paths);

}  // namespace tessera::data
