#include "table.h"

#include "machine.h"
#include "tessera/command_line.h"
#include "tessera/programs.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <cstdlib>
#include <iostream>

namespace tessera::benchmarks {
namespace {

constexpr int kUsageError = 2;  // after which the launcher adds nothing

}  // namespace

Table::Table(const std::string& question, const std::string& path) {
  if (path.empty()) return;
  file_.open(path);
  TORCH_CHECK_VALUE(file_, "bench ", question, ": expected to write to ", path,
                    ", but it can't be opened");
  write_machine_beside(path);
}

void Table::add(const std::string& line) {
  std::cout << line << std::endl;
  if (file_.is_open()) file_ << line << std::endl;
}

void show_ranks(CLI::App& app) {
  app.add_option("--ranks", tool::kBenchRanksHelp)
      ->type_name("INT")
      ->default_str(std::to_string(tool::kBenchRanks))
      ->check([](const std::string& count) {
        return "expected to be given to tessera bench, which starts the ranks, got " + count +
               " where they run already";
      });
}

std::optional<int> parse_words(CLI::App& app, int argc, char** argv) {
  try {
    tool::refuse_unknown_options(app, {argv + 1, argv + argc});
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    if (is_other_rank()) return 0;
    if (error.get_exit_code() == 0) return app.exit(error);
    std::cerr << app.get_name() << ": " << error.what() << "; see " << app.get_name()
              << " --help\n";
    return kUsageError;
  }
}

std::optional<int> refuse_without_gpu(const CLI::App& app) {
  if (torch::cuda::device_count() > 0) return std::nullopt;
  if (is_other_rank()) return 0;
  std::cerr << app.get_name()
            << ": --device cuda: expected a GPU, but libtorch finds none; use --device cpu, or a "
               "CUDA build of libtorch where a GPU is visible\n";
  return kUsageError;
}

int run_question(const std::string& question, const std::function<void()>& run) {
  try {
    at::set_num_threads(1);
    run();
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "tessera bench " << question << ": " << error.what_without_backtrace()
              << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "tessera bench " << question << ": " << error.what() << std::endl;
  }
  return 1;
}

bool is_other_rank() {
  const char* rank = std::getenv("TESSERA_RANK");
  return rank != nullptr && std::string(rank) != "0";
}

}  // namespace tessera::benchmarks
