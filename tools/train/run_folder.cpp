#include "train/run_folder.h"

#include <tessera/comm.h>

#include "train/agreed.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

/// Who may write to the folder may hold its lock, and nobody else: even a lock for reading, which
/// keeps others out, takes the permission to open the file.
mode_t lock_mode(const struct stat& folder, const struct stat& lock) {
  mode_t mode = S_IRUSR | S_IWUSR;
  if ((folder.st_mode & S_IWGRP) != 0 && folder.st_gid == lock.st_gid) mode |= S_IRGRP | S_IWGRP;
  if ((folder.st_mode & S_IWOTH) != 0) mode |= S_IROTH | S_IWOTH;
  return mode;
}

/// The descriptor of the file that is locked; -1 and errno.
int open_lock(const fs::path& path) {
  const int file =
      open((path / ".lock").c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
  struct stat folder{};
  struct stat lock{};
  if (file >= 0 && stat(path.c_str(), &folder) == 0 && fstat(file, &lock) == 0 &&
      lock.st_uid == geteuid() && fchmod(file, lock_mode(folder, lock)) != 0) {
    const int reason = errno;
    close(file);
    errno = reason;
    return -1;
  }
  return file;
}

/// Locks the file for this process; the kernel frees it when that ends. If another one has it, what
/// the kernel says of that one, otherwise empty; throws.
std::string lock_or_holder(int file, const fs::path& path) {
  constexpr int kMostAttempts = 100;
  for (int i = 0; i < kMostAttempts; ++i) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    if (fcntl(file, F_SETLK, &lock) == 0) return "";
    TORCH_CHECK_VALUE(errno == EACCES || errno == EAGAIN,
                      "--run: expected a folder whose files can be locked, got ", path.string(),
                      ": ", std::strerror(errno));
    if (fcntl(file, F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK) continue;  // it has let go
    return lock.l_pid > 0 ? "process " + std::to_string(lock.l_pid)
                          : "a process of another host or container";
  }
  return "one process after the other";
}

/// The lock's descriptor; throws.
int take(const fs::path& path, Start start) {
  std::error_code problem;
  fs::create_directories(path, problem);
  TORCH_CHECK_VALUE(!problem, "--run: expected a folder to write to, got ", path.string(), ": ",
                    problem.message());
  const int lock = open_lock(path);
  TORCH_CHECK_VALUE(lock >= 0, "--run: expected a folder to write to, got ", path.string(), ": ",
                    std::strerror(errno));
  const auto holder = lock_or_holder(lock, path);
  if (!holder.empty()) {
    close(lock);
    TORCH_CHECK_VALUE(false, "--run: expected a folder that nobody uses, got ", path.string(),
                      ", which ", holder, " is training in; wait for it, or use another --run");
  }
  if (start == Start::New && fs::exists(path / "metrics.jsonl")) {
    close(lock);
    TORCH_CHECK_VALUE(false, "--run: expected a new folder, got ", path.string(),
                      ", which holds a run; go on with it by --resume, or use another --run");
  }
  return lock;
}

}  // namespace

RunFolder::RunFolder(const std::string& path, Start start) : path_(path) {
  std::string problem;
  if (rank() == 0) {
    try {
      lock_ = take(path, start);
      metrics_.open(path + "/metrics.jsonl", std::ios::app);
    } catch (const std::exception& error) {
      problem = message_of(error);
    }
  }
  problem = broadcast_bytes(problem);
  if (!problem.empty()) throw AgreedError(problem, kWrongSettings);
}

RunFolder::~RunFolder() {
  if (lock_ >= 0) close(lock_);
}

std::string RunFolder::checkpoint(int64_t step) const {
  char name[32];
  std::snprintf(name, sizeof name, "/step-%08lld", static_cast<long long>(step));
  return checkpoints() + name;
}

void RunFolder::add_metrics(const nlohmann::json& line) {
  metrics_ << line.dump() + "\n" << std::flush;
  TORCH_CHECK(metrics_, "train: expected to write ", path_,
              "/metrics.jsonl: ", std::strerror(errno));
}

void RunFolder::write(const std::string& name, const std::string& text) const {
  const auto file = path_ + "/" + name;
  const auto temporary = file + ".part";
  {
    std::ofstream stream(temporary, std::ios::binary);
    stream << text << std::flush;
    TORCH_CHECK(stream, "train: expected to write ", file, ": ", std::strerror(errno));
  }
  fs::rename(temporary, file);
}

std::string RunFolder::read(const std::string& name) const {
  std::ifstream stream(path_ + "/" + name, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

void RunFolder::remove(const std::string& name) const {
  std::error_code ignored;
  fs::remove(path_ + "/" + name, ignored);
}

}  // namespace tessera::train
