#pragma once

#include <CLI/CLI.hpp>

#include <fstream>
#include <functional>
#include <optional>
#include <string>

namespace tessera::benchmarks {

/// A table of comma-separated lines: on standard output and, if `path` is not empty, in a file with
/// the machine's description beside it. `question` is the benchmark's name, for errors.
class Table {
 public:
  Table(const std::string& question, const std::string& path);
  void add(const std::string& line);

 private:
  std::ofstream file_;
};

/// Shows --ranks in the help, for questions to several ranks. `tessera bench` takes it and starts
/// them; to the program itself it is an error.
void show_ranks(CLI::App& app);

/// Parses the words behind `tessera bench QUESTION`. The exit code if there is nothing to run: help
/// was asked for, or a word is wrong; rank 0 alone tells.
std::optional<int> parse_words(CLI::App& app, int argc, char** argv);

/// For --device cuda, before any rank talks: the exit code if libtorch finds no GPU. Rank 0 alone
/// tells.
std::optional<int> refuse_without_gpu(const CLI::App& app);

/// Runs a benchmark with one thread. An error becomes a line that names the question, and 1.
int run_question(const std::string& question, const std::function<void()>& run);

/// Whether `tessera run` has started this program as a rank other than the first: for benchmarks
/// that only one process must run.
bool is_other_rank();

}  // namespace tessera::benchmarks
