// How much memory does a training step take, and what does saving it cost in time?
#include <tessera/comm.h>

#include "memory_sides.h"
#include "memory_table.h"
#include "numbers.h"
#include "rank0.h"
#include "table.h"

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <iostream>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;

constexpr const char* kReference = "plain";

struct Settings {
  std::vector<std::string> jobs = {"gpt"};
  std::vector<std::string> modes = memory_mode_names();
  int blocks = 12;
  int tokens = 32768;
  int pairs = 15;
  int steps = 2;
  std::string backend = "auto";
  std::string csv;
  bool list = false;
};

void report_progress(const std::string& what) {
  if (rank() == 0) std::cerr << "bench memory: " << what << std::endl;
}

/// All modes that the job knows, the reference first; their bytes are known, their times are not.
std::vector<MemoryRow> count_bytes(const MemoryJob& job, const Settings& settings) {
  auto modes = settings.modes;
  std::erase_if(modes,
                [&](const auto& mode) { return mode == kReference || !has_mode(job, mode); });
  modes.insert(modes.begin(), kReference);
  std::vector<MemoryRow> rows;
  for (const auto& mode : modes) {
    report_progress(job.label() + " " + mode + ": bytes");
    if (mode != kReference) MemorySide::require_same_gradients(job, mode, kReference);
    rows.push_back(
        {.job = job, .mode = mode, .use = MemorySide::measure(job, mode), .bound_bytes = 0});
    rows.back().bound_bytes = bound_of(job, mode, rows.front().use);
  }
  return rows;
}

/// Blocks of the modes in turn, so that a busy moment of the machine hits all alike; who begins
/// changes from round to round. The first round only warms up.
void time_in_turn(std::vector<MemoryRow>& rows, const Settings& settings) {
  struct Timed {
    MemoryRow* row;
    std::unique_ptr<MemorySide> side;
  };
  std::vector<Timed> sides;
  for (auto& row : rows) {
    if (is_start(row.mode)) continue;  // its steps are those of the mode it starts
    sides.push_back({&row, std::make_unique<MemorySide>(row.job, row.mode)});
  }
  for (int round = 0; round <= settings.pairs; ++round) {
    report_progress(rows.front().job.label() + ": pair " + std::to_string(round) + " of " +
                    std::to_string(settings.pairs));
    for (auto& [row, side] : sides) {
      const double seconds = side->time_block(settings.steps);
      if (round > 0) row->seconds.push_back(seconds);
    }
    std::rotate(sides.begin(), sides.begin() + 1, sides.end());
  }
}

void run(const Settings& settings) {
  MemoryTable table(settings.csv);
  for (const auto& name : settings.jobs) {
    const MemoryJob job{
        .name = name, .blocks = name == "gpt" ? settings.blocks : 1, .tokens = settings.tokens};
    auto rows = count_bytes(job, settings);
    if (is_timed(job)) time_in_turn(rows, settings);
    for (const auto& row : rows) {
      if (std::ranges::find(settings.modes, row.mode) != settings.modes.end())
        table.add(row, rows.front().seconds);
    }
  }
}

void add_options(CLI::App& app, Settings& settings) {
  app.add_option("--jobs", settings.jobs, "what is trained")
      ->delimiter(',')
      ->check(CLI::IsMember(memory_job_names()))
      ->capture_default_str();
  app.add_option("--modes", settings.modes, "plain, or how memory is saved")
      ->delimiter(',')
      ->check(CLI::IsMember(memory_mode_names()))
      ->capture_default_str();
  tool::add_number(app, "--blocks", settings.blocks, 1, 10'000, "depth of the gpt");
  tool::add_number(app, "--tokens", settings.tokens, 2, 1 << 24,
                   "in a sequence of the job attention: a multiple of twice the ranks");
  tool::add_number(app, "--pairs", settings.pairs, 1, 1'000'000,
                   "timed blocks of steps per mode; the median counts");
  tool::add_number(app, "--steps", settings.steps, 1, 1'000'000, "steps per timed block");
  app.add_option("--backend", settings.backend,
                 "auto: shm on one host, where units are not copied but seen in shared memory; "
                 "gloo: units are gathered into private memory")
      ->check(CLI::IsMember({"auto", "shm", "gloo"}))
      ->capture_default_str();
  app.add_option("--csv", settings.csv, "also write the table to this file");
  app.add_flag("--list", settings.list, "print jobs and modes, and stop");
}

constexpr const char* kAbout =
    "Bytes of tensors in a training step and its time, against the plain step; gradients are "
    "compared before anything is measured.\n"
    "steady_bytes: between steps; peak_bytes: on top of that, at the worst moment of a forward and "
    "its backward; both of the rank that takes most. Bytes are those of libtorch's allocator and, "
    "where ranks share memory for parameters, of that mapping by the number of ranks: it is there "
    "once per host. What ranks communicate through is not counted.\n"
    "bound_bytes: checkpoint: of peak_bytes, 0.3 of plain's. fully_shard: of both together: "
    "(parameters + gradients + optimizer state) / ranks + the outermost unit + two units of "
    "parameters + two of gradients + plain's peak_bytes (activations).\n"
    "fully_shard_start: a model built without memory, on the meta device, gets its values unit by "
    "unit; steady_bytes: when it has them; peak_bytes: on top of that, until then.\n"
    "attention is one causal layer of one head with 64 features, on one sequence: plain with all "
    "of "
    "it, or context_parallel with a part on each rank, which may take plain's peak_bytes / ranks "
    "and "
    "six times the rank's keys and values. Its steps are not timed.";

void list_choices() {
  std::cout << "jobs: " << CLI::detail::join(memory_job_names(), ",")
            << "\nmodes: " << CLI::detail::join(memory_mode_names(), ",") << "\n";
}

int parse_and_run(int argc, char** argv) {
  CLI::App app(kAbout, "tessera bench memory");
  Settings settings;
  show_ranks(app);
  add_options(app, settings);
  if (const auto code = parse_words(app, argc, argv)) return *code;
  if (settings.list) {
    if (!is_other_rank()) list_choices();
    return 0;
  }
  init({.backend = settings.backend});
  run(settings);
  shutdown();
  return 0;
}

int fail(const std::string& message) {
  std::cerr << "tessera: " << message << std::endl;
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    at::set_num_threads(1);
    return parse_and_run(argc, argv);
  } catch (const StoppedByRank0&) {
    return 0;
  } catch (const c10::Error& error) {
    return fail(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}
