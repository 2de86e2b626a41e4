#include "programs.h"

#include "numbers.h"
#include "own_program.h"
#include "train/run_paths.h"
#include "train/settings.h"
#include "train/terminal.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>
#include <set>

namespace tessera::tool {
namespace {

// By which launchers tell a process its rank. A Slurm script outside of srun has a SLURM_PROCID,
// too, but is no rank.
constexpr const char* kRankVariables[] = {"TESSERA_RANK", "RANK", "SLURM_STEP_ID",
                                          "OMPI_COMM_WORLD_RANK", "PMI_RANK"};
// A checkpoint that is being written when the job is told to end has this long to be finished.
constexpr const char* kGraceSeconds = "120";

bool has_rank() {
  return std::ranges::any_of(kRankVariables,
                             [](const char* name) { return std::getenv(name) != nullptr; });
}

bool lack_run(const std::vector<std::string>& arguments) {
  return std::ranges::none_of(arguments, [](const std::string& word) {
    return word == "--run" || word.starts_with("--run=");
  });
}

void start(const std::vector<std::string>& arguments) {
  CLI::App app("Trains a language model on the text files of a folder, on several ranks",
               "tessera train");
  train::Settings settings;
  const auto fields = train::add_settings(app, settings);
  app.footer(
      "tessera train --data FOLDER                   two ranks, a folder under runs/\n"
      "tessera train --ranks 4 --mesh dp=2,tp=2      two by two\n"
      "tessera train --resume --run runs/NAME        goes on where it was stopped or killed\n"
      "tessera run, torchrun, mpirun and srun may start it as well: then --ranks is theirs.");
  try {
    train::parse_settings(app, fields, settings, arguments);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return;
  }
  std::vector<std::string> words;
  if (!has_rank()) {
    train::check(settings, settings.ranks);
    train::check_memory(settings, settings.ranks, settings.ranks);
    train::check_paths(settings);
    words = {
        own_program().string(),
        "run",
        "-n",
        std::to_string(settings.ranks),
        "--no-prefix",
        "--grace",
        kGraceSeconds,
        "--max-restarts",
        std::to_string(settings.max_restarts),
        "--env",
        std::string(train::kColumnsVariable) + "=" + std::to_string(train::terminal_columns())};
    // Rank 0 tells what all ranks have found; another start would find the same. The last ones tell
    // of a signal to a single rank.
    for (const int code : {train::kWrongSettings, train::kAgreedFailure, train::kNotSaved,
                           128 + SIGHUP, 128 + SIGINT, 128 + SIGTERM}) {
      for (const char* option : {"--no-restart-on", "--quiet-on"})
        words.insert(words.end(), {option, std::to_string(code)});
    }
    const bool is_new_run = lack_run(arguments) && settings.run.empty();
    if (is_new_run)
      words.insert(words.end(), {"--env", std::string(train::kNewRunVariable) + "=1"});
    words.emplace_back("--");
  }
  words.push_back(program_beside("tessera-train"));
  words.insert(words.end(), arguments.begin(), arguments.end());
  if (!has_rank() && lack_run(arguments)) {
    // Named once: a job that is started anew after a failure goes on in the same folder.
    words.emplace_back("--run");
    words.push_back(settings.run.empty() ? train::make_run_folder() : settings.run);
  }
  become(std::move(words));
}

}  // namespace

void add_train_command(CLI::App& app, CommandLine& /*line*/) {
  auto* train = app.add_subcommand("train", "Train a language model on text, on several ranks");
  train->set_help_flag();  // its options are settings, which have a parser of their own
  train->allow_extras();
  train->callback([train] { start(train->remaining()); });
}

namespace {

/// All words behind it are the program's.
void add_program(CLI::App& app, const std::string& name, const char* help) {
  auto* command = app.add_subcommand(name, help);
  command->set_help_flag();
  command->allow_extras();
  command->callback([command, name] {
    std::vector<std::string> words = {program_beside("tessera-" + name)};
    const auto arguments = command->remaining();
    words.insert(words.end(), arguments.begin(), arguments.end());
    become(std::move(words));
  });
}

}  // namespace

void add_inspect_command(CLI::App& app, CommandLine& /*line*/) {
  add_program(app, "inspect",
              "List what a checkpoint, a file or a run holds; draw a compiled program");
}

void add_export_command(CLI::App& app, CommandLine& /*line*/) {
  add_program(app, "export", "Write the model of a run as a Hugging Face folder");
}

void add_tokenize_command(CLI::App& app, CommandLine& /*line*/) {
  add_program(app, "tokenize", "Write a large text's tokens as shards that tessera train reads");
}

namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "tessera-bench-";
constexpr int kUsageError = 2;  // of a benchmark, whose rank 0 has said what is wrong
// Not installed.
constexpr const char* kWithPythonPeers[] = {"dtensor", "train"};

struct BenchOptions {
  std::string question;
  int ranks = kBenchRanks;
};

std::string known_questions() {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(own_program().parent_path())) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(kPrefix)) names.insert(name.substr(std::string(kPrefix).size()));
  }
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none; build them with make build" : text;
}

std::string why_not(const std::string& question) {
  const auto text = "expected one of: " + known_questions() + "; got '" + question + "'";
  if (std::ranges::count(kWithPythonPeers, question) == 0) return text;
  return text +
         ", which compares with Python programs of the repository and is not installed; run "
         "it from a build of that (make build)";
}

/// The benchmarks link libtorch, which takes a while to load; this program does not. So they are
/// programs of their own, started as ranks like any other.
[[noreturn]] void run_benchmark(const BenchOptions& options,
                                const std::vector<std::string>& arguments) {
  const auto program = own_program().parent_path() / (kPrefix + options.question);
  if (!fs::exists(program)) throw CLI::ValidationError("question", why_not(options.question));
  std::vector<std::string> words = {own_program().string(),
                                    "run",
                                    "-n",
                                    std::to_string(options.ranks),
                                    "--no-prefix",
                                    "--quiet-on",
                                    std::to_string(kUsageError),
                                    "--env",
                                    "OMP_NUM_THREADS=1",
                                    "--",
                                    program.string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  become(std::move(words));
}

}  // namespace

void add_bench_command(CLI::App& app, CommandLine& /*line*/) {
  auto* bench =
      app.add_subcommand("bench", "Measure: comm, compile, dtensor, hooks, memory, save, train");
  auto options = std::make_shared<BenchOptions>();
  bench->footer(
      "tessera bench QUESTION [--ranks N] [OPTIONS OF THAT BENCHMARK]\ntessera bench comm --help");
  bench->set_help_flag();  // --help belongs to the question
  bench->add_option("question", options->question, "What to measure");
  add_number(*bench, "--ranks", options->ranks, 1, 4096, kBenchRanksHelp);
  bench->allow_extras();
  bench->callback([options, bench] {
    auto arguments = bench->remaining();
    const bool asks = std::ranges::any_of(
        arguments, [](const std::string& word) { return word == "--help" || word == "-h"; });
    if (options->question.empty()) {
      if (asks) throw CLI::CallForHelp();
      throw CLI::ValidationError("question", "expected one of: " + known_questions());
    }
    if (asks) options->ranks = 1;
    run_benchmark(*options, arguments);
  });
}

}  // namespace tessera::tool
