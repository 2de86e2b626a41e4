#include "train/train_run.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr auto kDeadline = 120s;

/// Words that repeat, so that a small model learns something in a few steps.
std::string small_text() {
  std::string text;
  for (int i = 0; i < 400; ++i) {
    text += "line " + std::to_string(i % 37) + " of a text that says " +
            (i % 3 == 0 ? "little" : "nothing") + ".\n";
  }
  return text;
}

std::map<int, double> values(const std::string& metrics, const std::string& field) {
  std::map<int, double> found;
  std::istringstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    const auto parsed = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_discarded() || !parsed.contains(field) || parsed[field].is_null()) continue;
    found[parsed["step"].get<int>()] = parsed[field].get<double>();
  }
  return found;
}

std::string text_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

}  // namespace

TrainingGround::TrainingGround() {
  fs::create_directory(path() / "text");
  std::ofstream(path() / "text" / "small.txt") << small_text();
}

Words TrainingGround::words(const std::string& run, const Words& further) const {
  const std::vector<std::pair<std::string, std::string>> defaults = {
      {"--data", (path() / "text").string()},
      {"--blocks", "2"},
      {"--width", "32"},
      {"--heads", "2"},
      {"--context", "32"},
      {"--batch", "4"},
      {"--steps", "12"},
      {"--warmup", "2"},
      {"--lr", "1e-2"},
      {"--save-every", "4"},
      {"--eval-every", "0"},
      {"--sample", "8"},
      {"--log-every", "1"}};
  Words words = {TESSERA_TOOL, "train", "--run", this->run(run)};
  for (const auto& [name, value] : defaults) {
    if (std::ranges::count(further, name) > 0) continue;
    if (name == "--data" && std::ranges::count(further, "--sft") > 0) continue;
    words.push_back(name);
    words.push_back(value);
  }
  words.insert(words.end(), further.begin(), further.end());
  return words;
}

ProgramResult TrainingGround::train(const std::string& run, const Words& further) const {
  return call(words(run, further));
}

Subprocess TrainingGround::start(const std::string& run, const Words& further) const {
  return Subprocess({.arguments = words(run, further),
                     .environment = {{"OMP_NUM_THREADS", "1"}},
                     .output = path() / (run + ".log"),
                     .folder = path(),
                     .own_process_group = true});
}

ProgramResult TrainingGround::call(const Words& words) const {
  return run_program(
      {.arguments = words, .environment = {{"OMP_NUM_THREADS", "1"}}, .folder = path()}, kDeadline);
}

std::string TrainingGround::read(const std::string& run, const std::string& file) const {
  return text_of(fs::path(this->run(run)) / file);
}

std::map<int, double> TrainingGround::losses(const std::string& run) const {
  return values(read(run, "metrics.jsonl"), "loss");
}

std::map<int, double> TrainingGround::validation_losses(const std::string& run) const {
  return values(read(run, "metrics.jsonl"), "val_loss");
}

std::vector<std::string> TrainingGround::checkpoints(const std::string& run) const {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(fs::path(this->run(run)) / "checkpoints"))
    names.push_back(entry.path().filename().string());
  std::ranges::sort(names);
  return names;
}

void TrainingGround::await_step(const std::string& run, int step) const {
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (std::chrono::steady_clock::now() < deadline) {
    if (losses(run).contains(step)) return;
    std::this_thread::sleep_for(5ms);
  }
  FAIL() << "step " << step << " of " << run << " never came: " << text_of(path() / (run + ".log"));
}

std::vector<pid_t> ranks_of(pid_t launcher) {
  std::map<int, pid_t> ranks;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const auto name = entry.path().filename().string();
    if (!std::ranges::all_of(name, [](char c) { return std::isdigit(c) != 0; })) continue;
    std::istringstream stat(text_of(entry.path() / "stat"));
    std::string pid, command, state;
    pid_t parent = 0;
    stat >> pid >> command >> state >> parent;
    if (parent != launcher || command.find("tessera-train") == std::string::npos) continue;
    const auto environment = text_of(entry.path() / "environ");
    const auto at = environment.find("TESSERA_RANK=");
    if (at != std::string::npos) ranks[std::atoi(environment.c_str() + at + 13)] = std::stoi(name);
  }
  std::vector<pid_t> pids;
  for (const auto& [rank, pid] : ranks) pids.push_back(pid);
  return pids;
}

ExitStatus end_of(Subprocess& job) {
  const auto status = job.wait(90s);
  EXPECT_TRUE(status) << "the job still runs: " << job.output();
  return status.value_or(ExitStatus{});
}

double largest_difference(const std::map<int, double>& left, const std::map<int, double>& right) {
  double largest = -1;
  for (const auto& [step, loss] : left) {
    const auto other = right.find(step);
    if (other != right.end()) largest = std::max(largest, std::abs(other->second - loss));
  }
  return largest < 0 ? std::numeric_limits<double>::infinity() : largest;
}

}  // namespace tessera::testing
