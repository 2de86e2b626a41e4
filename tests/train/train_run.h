#pragma once

#include "support/subprocess.h"
#include "support/temporary_folder.h"

#include <filesystem>
#include <map>
#include <string>
#include <vector>

/// `tessera train` as a user starts it, on a small text with a small model.
namespace tessera::testing {

using Words = std::vector<std::string>;

/// A folder with a text, in which runs are made.
class TrainingGround {
 public:
  TrainingGround();

  const std::filesystem::path& path() const { return folder_.path(); }
  std::string run(const std::string& name) const { return (path() / name).string(); }

  /// The small model's settings, the run's folder and these words.
  Words words(const std::string& run, const Words& further = {}) const;
  /// Trains to the end.
  ProgramResult train(const std::string& run, const Words& further = {}) const;
  /// Starts training and returns.
  Subprocess start(const std::string& run, const Words& further = {}) const;
  ProgramResult call(const Words& words) const;

  std::string read(const std::string& run, const std::string& file) const;
  /// By step; of steps that were done twice the later one.
  std::map<int, double> losses(const std::string& run) const;
  std::map<int, double> validation_losses(const std::string& run) const;
  std::vector<std::string> checkpoints(const std::string& run) const;
  /// Waits until the run has done this step.
  void await_step(const std::string& run, int step) const;

 private:
  TemporaryFolder folder_;
};

/// Process ids of the ranks of a run, by rank: children of children of `launcher` that are
/// tessera-train.
std::vector<pid_t> ranks_of(pid_t launcher);

/// How a job ended, which it must do before long.
ExitStatus end_of(Subprocess& job);

/// Largest difference of losses at equal steps, of those that both have; infinity if there are
/// none.
double largest_difference(const std::map<int, double>& left, const std::map<int, double>& right);

}  // namespace tessera::testing
