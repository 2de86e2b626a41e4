#pragma once

#include <filesystem>
#include <optional>
#include <string>

/// The folders of checkpoints: how one appears, is found and removed. No tensors, no ranks.
namespace tessera::state {

/// The folder in which rank 0 lets a checkpoint grow until it takes its place in one step.
class StagingFolder {
 public:
  /// Makes parents and an empty folder beside `dir`, and removes what a crash left there.
  StagingFolder(std::string function, const std::filesystem::path& dir);
  /// Removes it unless it was published.
  ~StagingFolder();
  StagingFolder(const StagingFolder&) = delete;
  StagingFolder& operator=(const StagingFolder&) = delete;

  /// Its files are on disk: takes the place of `dir`, and removes what was there.
  void publish();

  /// Where it grows.
  static std::filesystem::path path_for(const std::filesystem::path& dir);

 private:
  std::string function_;
  std::filesystem::path dir_, path_;
};

/// Throws a ValueError if a checkpoint may not appear there: something else lies there.
void check_place(const std::string& function, const std::filesystem::path& dir);

/// Absolute, without a separator at its end. Throws a ValueError if it can't be a folder's.
std::filesystem::path clean_path(const std::string& function, const std::string& dir);

/// The number that a name ends with, and what is before it; none without one.
struct NumberedName {
  std::string stem;
  uint64_t number = 0;
};
std::optional<NumberedName> numbered(const std::string& name);

/// Of the checkpoints beside `dir` whose names differ in the last number alone, those older than
/// the `count` whole ones with the largest numbers are removed. `dir` stays.
void keep_last_checkpoints(const std::filesystem::path& dir, int count);

}  // namespace tessera::state
