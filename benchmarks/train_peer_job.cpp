#include "train_peer_job.h"

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace tessera::benchmarks {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kRemedy =
    "run `make setup`, or name a Python that has it by TESSERA_PYTHON=/path/to/python";

std::string without_build(const std::string& version) {
  return version.substr(0, version.find('+'));
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0));
}

}  // namespace

std::string peer_python() {
  const char* variable = std::getenv("TESSERA_PYTHON");
  const std::string path = variable != nullptr ? variable : TESSERA_PYTHON;
  TORCH_CHECK_VALUE(access(path.c_str(), X_OK) == 0, "tessera bench: expected a Python with torch ",
                    TORCH_VERSION, " at ", path, ", but there is no program; ", kRemedy);
  return path;
}

PeerJob::PeerJob(const PeerGroup& group) {
  auto environment = group.environment;
  environment["OMP_NUM_THREADS"] = "1";
  environment["PYTHONDONTWRITEBYTECODE"] = "1";
  const auto program = peer_python();
  for (int rank = 0; rank < group.world_size; ++rank) {
    everybody_.push_back(rank);
    processes_.emplace_back(
        std::vector<std::string>{program, TESSERA_PEERS "/train.py", "--device", group.device,
                                 "--rank", std::to_string(rank), "--world-size",
                                 std::to_string(group.world_size)},
        environment);
  }
  start();
}

void PeerJob::start() {
  const auto port = nlohmann::json::parse(receive({0})[0]).at("port").get<int>();
  for (const int rank : everybody_) {
    if (rank != 0) send(rank, std::to_string(port));
  }
  for (const auto& answer : receive(everybody_)) {
    const auto version = nlohmann::json::parse(answer).at("ready").get<std::string>();
    TORCH_CHECK_VALUE(without_build(version) == without_build(TORCH_VERSION),
                      "bench train: expected peers to use torch ", TORCH_VERSION,
                      ", which this program was built with, but their torch is ", version, "; ",
                      kRemedy);
  }
  is_ready_ = true;
}

void PeerJob::begin(const Task& task) {
  task_ = task;
  ask("job " + task.job + " " + task.mode + " " + task.variant);
}

PeerJob& PeerJobs::of(const PeerGroup& group) {
  auto found = jobs_.find(group);
  if (found == jobs_.end()) found = jobs_.emplace(group, group).first;
  return found->second;
}

std::vector<std::string> PeerJob::ask(const std::string& request) {
  for (const int rank : everybody_) send(rank, request);
  return receive(everybody_);
}

void PeerJob::send(int rank, const std::string& line) {
  if (!processes_[rank].send(line)) fail_ended(rank);
}

std::vector<std::string> PeerJob::receive(const std::vector<int>& ranks) {
  // All at once: when one ends, the others wait for it in vain, and the one that ended knows why.
  const auto deadline = Clock::now() + kPeerTimeout;
  std::map<int, std::string> lines;
  while (true) {
    std::vector<pollfd> waiting;
    std::vector<int> silent;
    for (const int rank : ranks) {
      if (lines.contains(rank)) continue;
      std::string line;
      const auto received = processes_[rank].receive(line);
      if (received == PeerProcess::Received::Line) lines[rank] = line;
      if (received == PeerProcess::Received::End) fail_ended(rank);
      if (received != PeerProcess::Received::Nothing) continue;
      silent.push_back(rank);
      waiting.push_back({.fd = processes_[rank].descriptor(), .events = POLLIN, .revents = 0});
    }
    if (silent.empty()) break;
    if (poll(waiting.data(), waiting.size(), milliseconds_until(deadline)) == 0) {
      fail(silent[0], c10::str("said nothing for ", kPeerTimeout.count(), " s and was killed"),
           "Give fewer --steps, or a machine that is less busy");
    }
  }
  std::vector<std::string> result;
  for (const int rank : ranks) result.push_back(lines[rank]);
  return result;
}

void PeerJob::fail_ended(int rank) {
  fail(rank, "ended with " + processes_[rank].end(),
       is_ready_ ? "Run it again; if the machine was short of memory, with fewer ranks"
                 : std::string("If torch is missing there, ") + kRemedy);
}

void PeerJob::fail(int rank, const std::string& what, const std::string& remedy) {
  processes_[rank].end();
  const auto words = processes_[rank].last_words();
  const auto who = task_.name.empty()
                       ? std::string("PyTorch")
                       : "peer " + task_.name + " (job " + task_.job + ", mode " + task_.mode + ")";
  C10_THROW_ERROR(
      DistBackendError,
      c10::str("bench train: expected an answer of ", who, ", but its rank ", rank, " ", what,
               words.empty() ? "; it wrote nothing. " : "; its last words:\n" + words, remedy));
}

}  // namespace tessera::benchmarks
