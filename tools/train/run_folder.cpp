#include "train/run_folder.h"

#include <tessera/comm.h>

#include "train/agreed.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
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
int take(const fs::path& path, Start start) {
  std::error_code problem;
  fs::create_directories(path, problem);
  TORCH_CHECK_VALUE(!problem, "--run: expected a folder to write to, got ", path.string(), ": ",
                    problem.message());
  const auto file = path / ".lock";
  const int lock = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TORCH_CHECK_VALUE(lock >= 0, "--run: expected a folder to write to, got ", path.string(), ": ",
                    std::strerror(errno));
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const auto owner = read_text(file);
    close(lock);
    TORCH_CHECK_VALUE(false, "--run: expected a folder that nobody uses, got ", path.string(),
                      ", which process ", owner,
                      " is training in; wait for it, or use another --run");
  }
  if (start == Start::New && fs::exists(path / "metrics.jsonl")) {
    close(lock);
    TORCH_CHECK_VALUE(false, "--run: expected a new folder, got ", path.string(),
                      ", which holds a run; go on with it by --resume, or use another --run");
  }
  const auto pid = std::to_string(getpid()) + "\n";
  const bool noted = ftruncate(lock, 0) == 0 && ::write(lock, pid.data(), pid.size()) > 0;
  TORCH_CHECK_VALUE(noted, "--run: expected a folder to write to, got ", path.string(), ": ",
                    std::strerror(errno));
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
