#pragma once

#include <sys/types.h>

#include <chrono>
#include <compare>
#include <map>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// A program that is asked one line at a time through its standard input and answers one line at a
/// time through its standard output. It outlives neither this object nor this process.
class PeerProcess {
 public:
  PeerProcess(const std::vector<std::string>& arguments,
              const std::map<std::string, std::string>& environment);
  ~PeerProcess();
  PeerProcess(PeerProcess&& other) noexcept;
  PeerProcess& operator=(PeerProcess&&) = delete;

  /// False: it has closed its side.
  bool send(const std::string& line) const;
  /// Becomes readable when there is something new to receive, or at the end of the process.
  int descriptor() const { return channel_; }
  enum class Received { Nothing, Line, End };
  /// Takes what has arrived, without waiting; `line` is set if that completes one.
  Received receive(std::string& line);
  /// Kills it if it still runs. "signal 9", "exit code 1".
  std::string end();
  /// The last it wrote to standard error.
  std::string last_words() const;

 private:
  bool take_line(std::string& line);

  pid_t pid_ = -1;
  int channel_ = -1;
  int log_ = -1;  // standard error: memory, so that nothing stays behind
  int status_ = 0;
  bool ended_ = false;
  std::string arrived_;
};

/// The Python that peers run in: TESSERA_PYTHON, or that of the build. Throws if there is none.
std::string peer_python();

/// How many processes of peers/train.py, and where.
struct PeerGroup {
  std::string device;  // cpu, cuda
  int world_size;
  std::map<std::string, std::string> environment;

  auto operator<=>(const PeerGroup&) const = default;
};

/// PyTorch: processes of peers/train.py, which train one job after the other. A process that ends,
/// or says nothing for `kPeerTimeout`, is a c10::DistBackendError with its last words; the others
/// are then killed.
class PeerJob {
 public:
  struct Task {
    std::string name;  // as the errors call the peer
    std::string job;
    std::string mode;
    std::string variant;  // how Python runs a step: eager, compile, graph, graph_compile, jax
  };
  explicit PeerJob(const PeerGroup& group);

  /// What is trained from here on; what was before is forgotten.
  void begin(const Task& task);
  /// Sends the request to every process and returns their answers by rank.
  std::vector<std::string> ask(const std::string& request);

 private:
  void start();
  void send(int rank, const std::string& line);
  /// One line of each of these.
  std::vector<std::string> receive(const std::vector<int>& ranks);
  [[noreturn]] void fail_ended(int rank);
  [[noreturn]] void fail(int rank, const std::string& what, const std::string& remedy);

  Task task_;  // empty before the first
  std::vector<int> everybody_;
  bool is_ready_ = false;  // joined, and has torch
  std::vector<PeerProcess> processes_;
};

/// Those that were started: a start takes longer than many a row.
class PeerJobs {
 public:
  /// Starts it the first time.
  PeerJob& of(const PeerGroup& group);

 private:
  std::map<PeerGroup, PeerJob> jobs_;
};

/// Shorter than the default timeout of a group, in which the other ranks wait meanwhile.
inline constexpr std::chrono::seconds kPeerTimeout{240};

}  // namespace tessera::benchmarks
