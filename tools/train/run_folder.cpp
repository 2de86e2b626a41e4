#include "train/run_folder.h"

#include <tessera/comm.h>

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

std::string read_text(const fs::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

/// The lock's descriptor; throws.
int take(const fs::path& path, bool goes_on) {
  fs::create_directories(path);
  const auto file = path / ".lock";
  const int lock = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TORCH_CHECK_VALUE(lock >= 0, "train: expected a folder to write to, got ", path.string(), ": ",
                    std::strerror(errno));
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const auto owner = read_text(file);
    close(lock);
    TORCH_CHECK_VALUE(false, "train: expected a run folder that nobody uses, got ", path.string(),
                      ", which process ", owner,
                      " is training in; wait for it, or use another --run");
  }
  if (!goes_on && fs::exists(path / "metrics.jsonl")) {
    close(lock);
    TORCH_CHECK_VALUE(false, "train: expected a new run folder, got ", path.string(),
                      ", which holds a run; go on with it by --resume, or use another --run");
  }
  const auto pid = std::to_string(getpid()) + "\n";
  const bool noted = ftruncate(lock, 0) == 0 && ::write(lock, pid.data(), pid.size()) > 0;
  TORCH_CHECK_VALUE(noted, "train: expected a folder to write to, got ", path.string(), ": ",
                    std::strerror(errno));
  return lock;
}

}  // namespace

std::string new_run_path() {
  const auto now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char name[32];
  std::strftime(name, sizeof name, "runs/%Y-%m-%d-%H%M%S", &local);
  std::string path = name;
  for (int i = 2; fs::exists(path); ++i) path = std::string(name) + "-" + std::to_string(i);
  return path;
}

RunFolder::RunFolder(const std::string& path, bool goes_on) : path_(path) {
  std::string problem;
  if (rank() == 0) {
    try {
      lock_ = take(path, goes_on);
      metrics_.open(path + "/metrics.jsonl", std::ios::app);
    } catch (const c10::Error& error) {
      problem = error.what_without_backtrace();
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }
  problem = broadcast_bytes(problem);
  TORCH_CHECK_VALUE(problem.empty(), problem);
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

}  // namespace tessera::train
