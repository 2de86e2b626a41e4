#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::adopt {

/// What the user has to hear about a file.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct FoundFile {
  std::string name;            // as it is shown
  std::filesystem::path path;  // without links
};

struct FoundFiles {
  std::vector<FoundFile> files = {};         // each once
  std::vector<std::string> left_out = {};    // with the reason
  std::vector<std::string> unreadable = {};  // likewise: errors
};

/// The files among `words`, and the C++ sources in the folders among them. Links in folders, hidden
/// folders and folders of CMake builds are left out.
FoundFiles find_files(const std::vector<std::string>& words);

/// Throws FileError for what is no plain file, can't be read, or is too large for a source.
std::string read_source(const std::filesystem::path& path);

struct NewText {
  std::filesystem::path path;
  std::string before;
  std::string after;
};

/// Replaces the files, each in one step, with the mode they have. All new files are written before
/// the first one is replaced. Throws FileError, which says what was replaced: a file that can't be
/// written, or that somebody else has changed since it was read.
void replace_files(const std::vector<NewText>& texts);

}  // namespace tessera::adopt
