#include "train/run_paths.h"

#include <cstdlib>
#include <ctime>
#include <filesystem>

namespace tessera::train {

namespace fs = std::filesystem;

std::string make_run_folder() {
  const auto now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char name[32];
  std::strftime(name, sizeof name, "runs/%Y-%m-%d-%H%M%S", &local);
  fs::create_directories("runs");
  std::string path = name;
  // Whoever makes it has it: two jobs may start in the same second.
  for (int i = 2; !fs::create_directory(path); ++i)
    path = std::string(name) + "-" + std::to_string(i);
  return path;
}

std::string why_no_run_folder(const std::string& path) {
  std::error_code ignored;
  const auto real = fs::weakly_canonical(path, ignored);
  if (real == real.root_path()) return "is the root of the file system";
  const char* home = std::getenv("HOME");
  if (home != nullptr && fs::equivalent(path, home, ignored)) return "is the home folder";
  for (const char* file : {"metrics.jsonl", "config.toml"}) {
    if (fs::exists(real / file, ignored)) return "";
  }
  for (const auto& entry : fs::directory_iterator(real, ignored)) {
    // A start that ended before it wrote anything leaves its lock.
    if (entry.path().filename() != ".lock") return "holds other files and no run";
  }
  return "";
}

void remove_unused_folder(const std::string& path) {
  std::error_code ignored;
  fs::remove(path, ignored);  // fails if there is something in it
}

std::string newest_run() {
  std::string newest;
  fs::file_time_type when{};
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("runs", ignored)) {
    const auto config = entry.path() / "config.toml";
    if (!fs::exists(config)) continue;
    const auto written = fs::last_write_time(config);
    if (!newest.empty() && written <= when) continue;
    newest = entry.path().string();
    when = written;
  }
  return newest;
}

}  // namespace tessera::train
