#include "data/text_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

namespace tessera::data {

namespace {

/// Copies out of a mapping. False if the file behind it has become shorter: the kernel then
/// refuses to copy, where a plain copy would die of SIGBUS.
bool copy_out(const char* from, size_t count, char* to) {
  while (count > 0) {
    iovec target{to, count};
    iovec source{const_cast<char*>(from), count};
    const ssize_t copied = process_vm_readv(getpid(), &target, 1, &source, 1, 0);
    if (copied < 0 && errno == EFAULT) return false;
    if (copied <= 0) {  // the kernel does not let us; a file that shrinks just now is rare
      std::memcpy(to, from, count);
      return true;
    }
    to += copied;
    from += copied;
    count -= static_cast<size_t>(copied);
  }
  return true;
}

struct stat status_of(const OpenFile& file, const std::string& path, const char* caller) {
  struct stat status{};
  TORCH_CHECK_VALUE(fstat(file.descriptor(), &status) == 0, caller, ": expected a file at '", path,
                    "', but it can't be asked for its size: ", std::strerror(errno));
  TORCH_CHECK_VALUE(S_ISREG(status.st_mode), caller, ": expected a file at '", path,
                    "', got something that is no file");
  return status;
}

}  // namespace

OpenFile::OpenFile(const std::string& path, const char* caller)
    // A pipe without a writer would wait for one.
    : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  TORCH_CHECK_VALUE(descriptor_ >= 0, caller, ": expected a file that can be read at '", path,
                    "', got: ", std::strerror(errno));
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

TextFile::TextFile(std::string path, Access access, const char* caller) : path_(std::move(path)) {
  const OpenFile file(path_, caller);
  const struct stat status = status_of(file, path_, caller);
  size_ = status.st_size;
  device_ = status.st_dev;
  inode_ = status.st_ino;
  if (access == Access::Direct || size_ == 0) return;
  void* map =
      mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, file.descriptor(), 0);
  if (map != MAP_FAILED) map_ = static_cast<const char*>(map);
}

TextFile::~TextFile() {
  if (map_ != nullptr) munmap(const_cast<char*>(map_), static_cast<size_t>(size_));
}

TextFile::TextFile(TextFile&& other) noexcept
    : path_(std::move(other.path_)),
      size_(other.size_),
      device_(other.device_),
      inode_(other.inode_),
      map_(std::exchange(other.map_, nullptr)) {}

void TextFile::throw_changed(const char* caller) const {
  TORCH_CHECK_VALUE(false, caller, ": expected '", path_,
                    "' to stay as it was when it was opened, ", "with ", size_,
                    " bytes, but it has changed; start again with the data as it is, "
                    "or put it back");
}

void TextFile::read(int64_t first, int64_t count, char* out, const char* caller) const {
  if (count == 0) return;
  if (map_ == nullptr) {
    read_directly(first, count, out, caller);
    return;
  }
  if (!copy_out(map_ + first, static_cast<size_t>(count), out)) throw_changed(caller);
  // Asked after the copy, so that a change before and during it shows. Another file by this name,
  // or none, is no change of the mapped one.
  struct stat status{};
  if (stat(path_.c_str(), &status) != 0) return;
  const bool same = status.st_dev == device_ && status.st_ino == inode_;
  if (same && status.st_size != size_) throw_changed(caller);
}

void TextFile::read_directly(int64_t first, int64_t count, char* out, const char* caller) const {
  const OpenFile file(path_, caller);
  const int64_t got = file.read(first, count, out);
  TORCH_CHECK_VALUE(got >= 0, caller, ": can't read '", path_, "': ", std::strerror(errno));
  const struct stat status = status_of(file, path_, caller);
  const bool same = status.st_dev == device_ && status.st_ino == inode_ && status.st_size == size_;
  if (got != count || !same) throw_changed(caller);
}

void TextFile::for_each_piece(int64_t first, const char* caller,
                              const std::function<void(std::string_view)>& take) const {
  constexpr int64_t kPiece = 1 << 20;
  std::vector<char> piece(
      static_cast<size_t>(std::min(kPiece, std::max<int64_t>(size_ - first, 0))));
  for (int64_t at = first; at < size_; at += kPiece) {
    const int64_t count = std::min(kPiece, size_ - at);
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

}  // namespace tessera::data
