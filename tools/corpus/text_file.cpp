#include "corpus/text_file.h"

#include "base/text.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace tessera::data {

namespace {

// Note [files that change]
// Every read copies out of the mapping by a system call, which fails where a plain copy would die
// of SIGBUS because the file was cut short; where the kernel does not offer it, files are not
// mapped but read. After the copy the file's status is compared with the one at opening, so that a
// change before or during the copy shows. If it differs, the content decides: a file that was
// touched, or linked is the same, and its status is taken over. What can't be seen: writes to a
// mapped file that has lost its name, and writes through somebody else's mapping until the kernel
// writes them back, which is when it changes the status.

/// False: the file behind the mapping has become shorter.
bool copy_out(const char* from, size_t count, char* to) {
  while (count > 0) {
    iovec target{to, count};
    iovec source{const_cast<char*>(from), count};
    const ssize_t copied = process_vm_readv(getpid(), &target, 1, &source, 1, 0);
    if (copied <= 0) return false;
    to += copied;
    from += copied;
    count -= static_cast<size_t>(copied);
  }
  return true;
}

/// Sandboxes may forbid it.
bool can_copy_out() {
  static const bool can = [] {
    const char from = 'x';
    char to = ' ';
    return copy_out(&from, 1, &to);
  }();
  return can;
}

int64_t nanoseconds(const timespec& time) {
  return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

FileStatus status_from(const struct stat& found) {
  return {.device = found.st_dev,
          .inode = found.st_ino,
          .size = found.st_size,
          .modified = nanoseconds(found.st_mtim),
          .changed = nanoseconds(found.st_ctim)};
}

FileStatus status_of(const OpenFile& file, const std::string& path, const char* caller) {
  struct stat found{};
  TORCH_CHECK_VALUE(fstat(file.descriptor(), &found) == 0, caller, ": expected a file at '",
                    printable(path),
                    "', but it can't be asked for its size: ", std::strerror(errno));
  TORCH_CHECK_VALUE(S_ISREG(found.st_mode), caller, ": expected a file at '", printable(path),
                    "', got something that is no file");
  return status_from(found);
}

}  // namespace

struct TextFile::Expected {
  int64_t first = 0;
  std::optional<ContentHash::Value> hash;
  std::mutex mutex;
  FileStatus status;  // at which the content was the expected one
};

OpenFile::OpenFile(const std::string& path, const char* caller)
    // A pipe without a writer would wait for one.
    : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  TORCH_CHECK_VALUE(descriptor_ >= 0, caller, ": expected a file that can be read at '",
                    printable(path), "', got: ", std::strerror(errno));
}

OpenFile::~OpenFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

int64_t OpenFile::read(int64_t first, int64_t count, char* out) const {
  int64_t done = 0;
  while (done < count) {
    const ssize_t got =
        pread(descriptor_, out + done, static_cast<size_t>(count - done), first + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    done += got;
  }
  return done;
}

TextFile::TextFile(std::string path, Access access, const char* caller)
    : TextFile(OpenFile(path, caller), path, access, caller) {
  held_.reset();
}

TextFile::TextFile(const OpenFile& file, std::string path, Access access, const char* caller)
    : path_(std::move(path)),
      opened_(status_of(file, path_, caller)),
      expected_(std::make_unique<Expected>()) {
  expected_->status = opened_;
  if (access == Access::Mapped && size() > 0 && can_copy_out()) {
    void* map =
        mmap(nullptr, static_cast<size_t>(size()), PROT_READ, MAP_SHARED, file.descriptor(), 0);
    if (map != MAP_FAILED) map_ = static_cast<const char*>(map);
  }
  if (map_ == nullptr) held_ = std::make_unique<OpenFile>(dup(file.descriptor()));
}

TextFile::~TextFile() {
  if (map_ != nullptr) munmap(const_cast<char*>(map_), static_cast<size_t>(size()));
}

TextFile::TextFile(TextFile&& other) noexcept
    : path_(std::move(other.path_)),
      opened_(other.opened_),
      map_(std::exchange(other.map_, nullptr)),
      held_(std::move(other.held_)),
      expected_(std::move(other.expected_)) {}

void TextFile::expect_content(int64_t first, const ContentHash::Value& hash) {
  expected_->first = first;
  expected_->hash = hash;
}

void TextFile::throw_changed(const char* caller) const {
  TORCH_CHECK_VALUE(false, caller, ": expected '", printable(path_),
                    "' to stay as it was when it was opened, with ", size(),
                    " bytes, but it has changed; put it back, or start a new run with the data as "
                    "it is");
}

void TextFile::read(int64_t first, int64_t count, char* out, const char* caller) const {
  if (count == 0) return;
  constexpr int kMostAttempts = 100;  // each of them fails by another touch
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    const Copied copied = copy(first, count, out, caller);
    if (!copied.is_whole) break;
    if (!copied.status || !is_doubtful(*copied.status, caller)) return;
  }
  throw_changed(caller);
}

TextFile::Copied TextFile::copy(int64_t first, int64_t count, char* out, const char* caller) const {
  if (map_ == nullptr) {
    std::optional<OpenFile> reopened;
    const OpenFile& file = held_ ? *held_ : reopened.emplace(path_, caller);
    const int64_t got = file.read(first, count, out);
    TORCH_CHECK_VALUE(got >= 0, caller, ": can't read '", printable(path_),
                      "': ", std::strerror(errno));
    const FileStatus found = status_of(file, path_, caller);
    return {.is_whole = got == count && found.is_same_file(opened_), .status = found};
  }
  if (!copy_out(map_ + first, static_cast<size_t>(count), out)) return {.is_whole = false};
  struct stat found{};
  if (stat(path_.c_str(), &found) != 0 || !status_from(found).is_same_file(opened_)) return {};
  return {.status = status_from(found)};
}

bool TextFile::is_doubtful(const FileStatus& found, const char* caller) const {
  const std::lock_guard lock(expected_->mutex);
  if (found == expected_->status) return false;
  // Asked again: another thread may have seen a later one, and have hashed the file for it.
  const auto [is_whole, latest] = copy(0, 0, nullptr, caller);
  if (!is_whole || found.size != size() || !expected_->hash) throw_changed(caller);
  if (!latest || *latest == expected_->status) return true;
  constexpr int64_t kPiece = 1 << 20;
  std::vector<char> piece(static_cast<size_t>(std::min(kPiece, size())));
  ContentHash hash;
  for (int64_t at = expected_->first; at < size(); at += kPiece) {
    const int64_t count = std::min(kPiece, size() - at);
    if (!copy(at, count, piece.data(), caller).is_whole) throw_changed(caller);
    hash.add({piece.data(), static_cast<size_t>(count)});
  }
  if (hash.value() != *expected_->hash) throw_changed(caller);
  expected_->status = *latest;
  return true;
}

void TextFile::for_each_piece(int64_t first, const char* caller,
                              const std::function<void(std::string_view)>& take) const {
  constexpr int64_t kPiece = 1 << 20;
  std::vector<char> piece(
      static_cast<size_t>(std::min(kPiece, std::max<int64_t>(size() - first, 0))));
  for (int64_t at = first; at < size(); at += kPiece) {
    const int64_t count = std::min(kPiece, size() - at);
    read(at, count, piece.data(), caller);
    take({piece.data(), static_cast<size_t>(count)});
  }
}

std::string read_whole_file(const std::string& path, const char* caller) {
  const TextFile file(path, TextFile::Access::Direct, caller);
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(0, file.size(), text.data(), caller);
  return text;
}

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

  /// What is built, what training itself and write_shards have written, and others' code.
  static bool is_skipped(const fs::directory_entry& folder) {
    std::error_code ignored;
    return std::ranges::count(kSkippedFolders, folder.path().filename().string()) > 0 ||
           fs::exists(folder.path() / "metrics.jsonl", ignored) ||
           fs::exists(folder.path() / kShardIndex, ignored);
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

TextFile::Access access_to(size_t number) {
  constexpr size_t kMostMaps = 16384;
  return number < kMostMaps ? TextFile::Access::Mapped : TextFile::Access::Direct;
}

std::vector<TextFile> open_texts(const std::vector<FoundText>& found) {
  std::vector<TextFile> texts;
  texts.reserve(found.size());
  for (const FoundText& text : found) {
    texts.emplace_back(text.path, access_to(texts.size()), kCaller);
  }
  return texts;
}

FoundTexts find_texts(const std::vector<std::string>& paths) {
  FoundTexts found;
  TextSearch search(found);
  for (const std::string& path : paths) search.take_path(path);
  return found;
}

}  // namespace tessera::data
