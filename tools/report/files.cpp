#include "report/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>

namespace tessera::report {

namespace fs = std::filesystem;

std::optional<std::string> read_file(const fs::path& file, std::size_t most_bytes) {
  std::error_code error;
  const auto status = fs::status(file, error);
  if (status.type() == fs::file_type::not_found) return std::nullopt;
  if (status.type() != fs::file_type::regular) {
    throw ReportError("expected a plain file, got " + file.string() +
                      ", which is none or unreadable");
  }
  const auto size = fs::file_size(file, error);
  if (error || size > most_bytes) {
    throw ReportError("expected " + file.string() + " to have at most " + size_text(most_bytes) +
                      (error ? ", but " + error.message() : ", got " + size_text(size)));
  }
  std::ifstream stream(file, std::ios::binary);
  std::string text(size, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(size));
  if (!stream.is_open() || stream.bad()) {
    throw ReportError("expected to read " + file.string() +
                      ", but could not; check its permissions");
  }
  text.resize(static_cast<std::size_t>(stream.gcount()));  // it may have shrunk meanwhile
  return text;
}

namespace {

/// False if not all of it could be written. `flags` as open(2)'s.
bool write_whole(const fs::path& file, const std::string& text, int flags) {
  const int descriptor = ::open(file.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666);
  if (descriptor < 0) return false;
  size_t done = 0;
  while (done < text.size()) {
    const auto written = ::write(descriptor, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    done += static_cast<size_t>(written);
  }
  return (::close(descriptor) == 0) & (done == text.size());
}

/// Where a link of this user or of the system leads; one that somebody else has put there is
/// replaced itself.
fs::path behind_own_links(const fs::path& file) {
  struct stat found{};
  const bool is_own_link = ::lstat(file.c_str(), &found) == 0 && S_ISLNK(found.st_mode) &&
                           (found.st_uid == ::geteuid() || found.st_uid == 0);
  std::error_code error;
  const auto real = is_own_link ? fs::canonical(file, error) : file;
  return error ? file : real;
}

/// Writes beside the file and renames; what is no plain file, such as /dev/stdout, cannot be
/// replaced and is written to.
bool replace_file(const fs::path& file, const std::string& text) {
  std::error_code error;
  const auto type = fs::status(file, error).type();
  if (type != fs::file_type::not_found && type != fs::file_type::regular)
    return write_whole(file, text, 0);
  const fs::path real = behind_own_links(file);
  const fs::path part = real.string() + ".part" + std::to_string(::getpid());
  fs::remove(part, error);
  if (write_whole(part, text, O_CREAT | O_EXCL)) {
    fs::rename(part, real, error);
    if (!error) return true;
  }
  fs::remove(part, error);
  return false;
}

}  // namespace

void write_file(const fs::path& file, const std::string& text) {
  if (replace_file(file, text)) return;
  throw ReportError("expected to write " + file.string() +
                    ", but could not; check that its folder exists, may be written and has room, "
                    "or name another file with -o");
}

std::string size_text(std::size_t bytes) {
  constexpr std::array kUnits = {"bytes", "kB", "MB", "GB", "TB"};
  double size = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; size >= 1000 && unit + 1 < kUnits.size(); ++unit) size /= 1000;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", size, kUnits[unit]);
  return text;
}

}  // namespace tessera::report
