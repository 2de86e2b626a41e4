#include "adopt/adopted.h"

#include "adopt/project.h"
#include "support/temporary_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

namespace tessera::test {
namespace {

constexpr const char* kInclude = "#include <tessera/nn.h>";

Adopted run_once(const Files& files, const std::vector<std::string>& given) {
  const testing::TemporaryFolder folder;
  std::vector<std::string> words;
  for (const auto& [name, text] : files) {
    const auto path = folder.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << text;
    if (given.empty() || std::ranges::count(given, name) > 0) words.push_back(path.string());
  }
  const auto start = folder.path().string() + "/";
  const auto shortened = [&](std::string text) {
    const auto at = text.find(start);
    return at == std::string::npos ? text : text.erase(0, at + start.size());
  };
  adopt::Project project(adopt::find_files(words).files);
  Adopted adopted{.files = files};
  for (const auto& result : project.results()) {
    const auto name = shortened(result.source->name);
    adopted.files[name] = adopt::apply_edits(result.source->text, result.rewrite.edits);
    for (const auto& note : result.rewrite.notes) {
      std::string names;
      for (const auto& each : note.names) names += (names.empty() ? "" : ", ") + each;
      auto& notes = note.needs_hand ? adopted.left : adopted.stays;
      notes.push_back(std::to_string(note.line) + " " + names + ": " + note.reason);
    }
  }
  for (const auto& error : project.errors()) adopted.errors.push_back(shortened(error));
  for (const auto& name : project.also()) adopted.also.push_back(shortened(name));
  return adopted;
}

}  // namespace

Adopted adopt_files(const Files& files, const std::vector<std::string>& given) {
  auto first = run_once(files, given);
  EXPECT_EQ(run_once(first.files, given).files, first.files);
  return first;
}

std::string adopted(const std::string& text) {
  const auto result = adopt_files({{"a.cpp", text}});
  EXPECT_TRUE(result.errors.empty()) << result.errors[0];
  auto after = result.files.at("a.cpp");
  if (const auto at = after.find(kInclude); at != std::string::npos && after != text)
    after.erase(at, after.find('\n', at) + 1 - at);
  return after;
}

std::vector<std::string> left(const std::string& text) {
  return adopt_files({{"a.cpp", text}}).left;
}

}  // namespace tessera::test
