#pragma once

#include "launcher/exit_queue.h"
#include "launcher/rank_environment.h"
#include "launcher/rank_process.h"
#include "launcher/rank_stream.h"
#include "launcher/session.h"

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace tessera::launcher {

struct JobOptions {
  int ranks = 1;
  std::vector<std::string> command;  // the program and its words
  std::vector<Setting> settings;
  bool has_prefix = true;
  std::chrono::duration<double> grace{5};             // from the request to end until SIGKILL
  std::chrono::duration<double> stopped_timeout{30};  // of a rank by SIGSTOP; 0: none
  std::vector<int> final_codes;  // by which a rank speaks for the job, told to end or not
};

struct RankFailure {
  int rank = 0;
  RankEnd end;
  double seconds = 0;                  // from the start of the job
  std::deque<std::string> last_lines;  // of its stderr; if it wrote nothing there of its stdout,
                                       // unless SIGKILL ended it
  bool was_stopped = false;            // by SIGSTOP or a debugger, for longer than it may
};

/// How the job ended: neither means that every rank exited with 0.
struct JobOutcome {
  std::optional<RankFailure> failure;  // the rank that failed first, unless it was told to end
  int signal = 0;                      // that ended the job from outside
  bool was_killed = false;             // ranks that had been told to end and did not
};

/// One start of all ranks: a single-threaded loop over signals, exits and output.
class Job {
 public:
  Job(const JobOptions& options, int restart_count, Session& session);
  ~Job();  // leaves no process of the job behind
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  /// Returns when all ranks have ended, whatever they started is gone and their output is queued.
  /// Throws what start_rank throws.
  JobOutcome run();

 private:
  using Clock = std::chrono::steady_clock;

  enum class Phase {
    Running,
    Stopping,  // told to end; until deadline_
    Killed,
  };

  struct Rank {
    RankProcess process;
    RankStream out;
    RankStream err;
    bool has_ended = false;
    std::optional<Clock::time_point> stopped_since = std::nullopt;
    bool is_stop_told = false;
    bool is_stopped_too_long = false;
  };

  void start_ranks();
  void wait_and_handle();
  int milliseconds_to_deadline() const;
  void handle_signal(int signal);
  void handle_ending_signal(int signal);
  void handle_exits();
  void handle_deadline();
  void look_after_orphans();
  void look_at_stops();
  void look_at_stop(int number, Rank& rank);
  void stop(int signal);
  void forward(int signal);
  bool is_done() const;
  std::string laggards() const;
  void end_processes();

  const JobOptions& options_;
  int restart_count_;
  Session& session_;
  ExitQueue exits_;
  std::vector<Rank> ranks_;
  int running_ranks_ = 0;
  bool has_group_orphans_ = false;  // a rank has ended and processes of its group have not
  Phase phase_ = Phase::Running;
  Clock::time_point started_at_;
  std::optional<Clock::time_point> deadline_;
  Clock::time_point next_look_{};
  int stop_signal_ = 0;
  JobOutcome outcome_;
};

}  // namespace tessera::launcher
