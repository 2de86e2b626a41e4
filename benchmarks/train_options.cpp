#include "train_options.h"

#include "jobs.h"
#include "numbers.h"
#include "train_modes.h"
#include "train_peers.h"

namespace tessera::benchmarks {
namespace {

std::string line_of(const std::string& title, const std::vector<std::string>& names) {
  return title + ": " + CLI::detail::join(names, ",") + "\n";
}

}  // namespace

TrainOptions::TrainOptions() : jobs(job_names()), modes(mode_names()) {
  std::erase_if(modes, is_compiled);  // which have peers of their own
}

void add_train_options(CLI::App& app, TrainOptions& options) {
  app.add_option("--jobs", options.jobs, "what is trained")
      ->delimiter(',')
      ->check(CLI::IsMember(job_names()))
      ->capture_default_str();
  app.add_option("--modes", options.modes, "how the ranks train it together")
      ->delimiter(',')
      ->check(CLI::IsMember(mode_names()))
      ->capture_default_str();
  app.add_option("--peer", options.peers,
                 "whom to compare with: pytorch is DistributedDataParallel in Python, "
                 "pytorch_malloc the same with glibc told to keep freed memory, reducer_* its "
                 "engine in C++")
      ->delimiter(',')
      ->check(CLI::IsMember(peer_names()))
      ->capture_default_str();
  tool::add_number(app, "--pairs", options.pairs, 1, 1'000'000,
                   "timed blocks of each side per row; the median counts");
  tool::add_number(app, "--steps", options.steps, 0, 1'000'000,
                   "steps per block; 0: as the job needs");
  app.add_option("--csv", options.csv,
                 "also write the table to this file; beside it: bounds and the machine");
  app.add_flag("--list", options.list, "print jobs, modes and peers, and stop");
}

std::string list_choices() {
  return line_of("jobs", job_names()) + line_of("modes", mode_names()) +
         line_of("peers", peer_names());
}

}  // namespace tessera::benchmarks
