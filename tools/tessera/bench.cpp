#include "bench.h"

#include "numbers.h"
#include "own_program.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>

namespace tessera::tool {
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
