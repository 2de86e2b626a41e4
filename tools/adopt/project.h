#pragma once

#include "adopt/files.h"
#include "adopt/outline.h"
#include "adopt/rewrite.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tessera::adopt {

/// What becomes of one file.
struct Result {
  const Source* source = nullptr;
  Rewrite rewrite = {};  // with the #include
  std::size_t places = 0;
};

/// The files that were given, and what they include of the program.
class Project {
 public:
  explicit Project(const std::vector<FoundFile>& files);

  /// Of the files that were given and could be read.
  std::vector<Result> results();

  const std::vector<std::string>& errors() const { return errors_; }  // "file:line: …"
  /// Files that are included, would change as well and were not given.
  std::vector<std::string> also();

 private:
  Source* load(const std::string& name, const std::filesystem::path& path, bool is_given);
  void find_includes(Source& source);
  const Source* find_include(const Source& source, const Fact& include);
  void find_obstacles(Source& source) const;
  bool is_holder(const std::string& impl) const;
  void add_includes(std::vector<Result>& results) const;

  std::map<std::filesystem::path, std::unique_ptr<Source>> sources_;
  std::vector<Source*> given_;
  std::vector<std::string> errors_;
};

}  // namespace tessera::adopt
