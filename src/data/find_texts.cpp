#include "data/find_texts.h"

#include "base/text.h"
#include "data/text_file.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

namespace tessera::data {

namespace {

namespace fs = std::filesystem;

constexpr const char* kCaller = "Corpus";
constexpr std::array<std::string_view, 3> kSkippedFolders = {"build", "runs", "node_modules"};

bool is_binary(const std::string& path) {
  std::vector<char> beginning(64 << 10);
  const OpenFile file(path, kCaller);
  const int64_t got = file.read(0, static_cast<int64_t>(beginning.size()), beginning.data());
  TORCH_CHECK_VALUE(got >= 0, "Corpus: can't read '", printable(path), "': ", std::strerror(errno));
  return std::memchr(beginning.data(), '\0', static_cast<size_t>(got)) != nullptr;
}

/// Walks folders and keeps their text files.
class TextSearch {
 public:
  explicit TextSearch(FoundTexts& found) : found_(found) {}

  void take_path(const std::string& path) {
    struct stat status{};
    TORCH_CHECK_VALUE(stat(path.c_str(), &status) == 0, "Corpus: expected a file or a folder at '",
                      printable(path), "', got: ", std::strerror(errno));
    if (!S_ISDIR(status.st_mode)) {
      take_file({path, fs::path(path).filename().string()}, status);
      return;
    }
    std::vector<FoundText> inside;
    list_folder(path, "", inside);
    std::sort(inside.begin(), inside.end(),
              [](const FoundText& a, const FoundText& b) { return a.name < b.name; });
    for (FoundText& text : inside) take_listed(std::move(text));
  }

 private:
  void list_folder(const fs::path& folder, const std::string& prefix,
                   std::vector<FoundText>& inside) {
    std::error_code error;
    fs::directory_iterator entries(folder, error);
    for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
      const std::string name = entries->path().filename().string();
      std::error_code ignored;
      const bool is_folder = entries->is_directory(ignored);
      if (name.starts_with('.') || (is_folder ? is_skipped(*entries) : name == "report.html")) {
        ++found_.left_out.hidden;
      } else if (is_folder && entries->is_symlink(ignored)) {
        ++found_.left_out.no_file;  // links can go round in circles
      } else if (is_folder) {
        list_folder(entries->path(), prefix + name + "/", inside);
      } else {
        inside.push_back({entries->path().string(), prefix + name});
      }
    }
    TORCH_CHECK_VALUE(!error, "Corpus: expected a folder that can be read at '",
                      printable(folder.string()), "', got: ", error.message());
  }

  /// What is built, what training itself has written, and others' code.
  static bool is_skipped(const fs::directory_entry& folder) {
    std::error_code ignored;
    return std::ranges::count(kSkippedFolders, folder.path().filename().string()) > 0 ||
           fs::exists(folder.path() / "metrics.jsonl", ignored);
  }

  void take_listed(FoundText text) {
    struct stat status{};
    if (stat(text.path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) {
      ++found_.left_out.no_file;
    } else if (status.st_size == 0) {
      ++found_.left_out.empty;
    } else if (is_binary(text.path)) {
      ++found_.left_out.not_text;
    } else {
      take_file(std::move(text), status);
    }
  }

  void take_file(FoundText text, const struct stat& status) {
    if (seen_.emplace(status.st_dev, status.st_ino).second) found_.files.push_back(std::move(text));
  }

  FoundTexts& found_;
  std::set<std::pair<dev_t, ino_t>> seen_;
};

}  // namespace

std::string LeftOut::text() const {
  std::string text;
  const auto add = [&text](int count, const char* what) {
    if (count > 0) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + what;
  };
  add(hidden, "hidden, or named build, runs or node_modules");
  add(not_text, "not text (with a zero byte)");
  add(empty, "empty");
  add(no_file, "no files, or links to folders");
  return text.empty() ? "nothing" : text;
}

FoundTexts find_texts(const std::vector<std::string>& paths) {
  FoundTexts found;
  TextSearch search(found);
  for (const std::string& path : paths) search.take_path(path);
  return found;
}

}  // namespace tessera::data
