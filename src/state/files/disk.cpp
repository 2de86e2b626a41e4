#include "state/files/disk.h"

#include "base/crc32c.h"
#include "base/signal_block.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

namespace tessera::state {
namespace {

constexpr size_t kSmallPiece = 256 << 10;
constexpr size_t kSmallBuffer = 1 << 20;
constexpr size_t kWritePiece = 4 * kChecksumBlock;  // checksummed while it is in the cache
constexpr uint64_t kStartWriting = 16 << 20;

std::atomic<uint64_t>& read_counter() {
  static std::atomic<uint64_t> counter{0};
  return counter;
}

std::string system_message() {
  return std::string(std::strerror(errno)) +
         (errno == EFBIG ? " (ulimit -f, or more than the file system takes)" : "");
}

}  // namespace

InputFile::InputFile(FileName name)
    : name_(std::move(name)),
      descriptor_(
          open(name_.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {  // pipes, too, return
  if (descriptor_ < 0) {
    name_.refuse("expected a file that can be read, got: ", system_message(),
                 "; check the path, and that all ranks see it");
  }
  struct stat facts{};
  if (fstat(descriptor_, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    close(descriptor_);
    name_.refuse("expected a file, got a folder or something else");
  }
  bytes_ = static_cast<uint64_t>(facts.st_size);
}

InputFile::~InputFile() { close(descriptor_); }

void InputFile::read(uint64_t position, void* to, size_t count) const {
  auto* next = static_cast<uint8_t*>(to);
  while (count > 0) {
    const auto got = pread(descriptor_, next, count, static_cast<off_t>(position));
    if (got < 0 && errno == EINTR) continue;
    TORCH_CHECK(got >= 0, name_.function, ": ", name_.path, ": could not read ", count,
                " bytes at ", position, ": ", system_message());
    name_.require(got > 0, "expected ", count, " more bytes at ", position,
                  ", got the end of the file; it is truncated");
    read_counter() += static_cast<uint64_t>(got);
    next += got;
    position += static_cast<uint64_t>(got);
    count -= static_cast<size_t>(got);
  }
}

std::string InputFile::read(uint64_t position, size_t count) const {
  std::string bytes(count, '\0');
  read(position, bytes.data(), count);
  return bytes;
}

uint64_t bytes_read_so_far() { return read_counter(); }

OutputFile::OutputFile(FileName name)
    : name_(std::move(name)),
      descriptor_(open(name_.path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) fail("create it");
}

OutputFile::~OutputFile() { close(descriptor_); }

void OutputFile::fail(const char* what) const {
  TORCH_CHECK(false, name_.function, ": ", name_.path, ": could not ", what, ": ", system_message(),
              "; what was there before is unchanged");
  std::abort();  // not reached: the check throws
}

void OutputFile::write_through(const uint8_t* bytes, size_t count) {
  const SignalBlock block(SIGXFSZ);
  while (count > 0) {
    const auto written = pwrite(descriptor_, bytes, count, static_cast<off_t>(position_));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write to it");
    bytes += written;
    position_ += static_cast<uint64_t>(written);
    count -= static_cast<size_t>(written);
  }
  if (position_ - started_ < kStartWriting) return;
  // The disk works while the rest is prepared; an error shows in fsync.
  sync_file_range(descriptor_, static_cast<off_t>(started_),
                  static_cast<off_t>(position_ - started_), SYNC_FILE_RANGE_WRITE);
  started_ = position_;
}

void OutputFile::flush() {
  write_through(small_.data(), small_.size());
  small_.clear();
}

void OutputFile::write(const void* bytes, size_t count) {
  const auto* first = static_cast<const uint8_t*>(bytes);
  if (count >= kSmallPiece) {
    flush();
    write_through(first, count);
    return;
  }
  if (small_.size() + count > kSmallBuffer) flush();
  small_.insert(small_.end(), first, first + count);
}

void OutputFile::write(const void* bytes, size_t count, std::vector<uint32_t>& checksums) {
  const auto* next = static_cast<const uint8_t*>(bytes);
  while (count > 0) {
    const auto piece = std::min(count, kWritePiece);
    append_block_checksums(next, piece, checksums);
    write(next, piece);
    next += piece;
    count -= piece;
  }
}

void OutputFile::finish() {
  flush();
  if (fsync(descriptor_) != 0) fail("bring it to the disk");
}

void sync_folder(const FileName& folder) {
  const int descriptor = open(folder.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TORCH_CHECK(descriptor >= 0, folder.function, ": ", folder.path,
              ": could not open the folder: ", system_message());
  const int failed = fsync(descriptor);
  const int reason = errno;
  close(descriptor);
  // Some file systems do not know fsync of folders.
  TORCH_CHECK(failed == 0 || reason == EINVAL, folder.function, ": ", folder.path,
              ": could not bring the folder to the disk: ", std::strerror(reason));
}

}  // namespace tessera::state
