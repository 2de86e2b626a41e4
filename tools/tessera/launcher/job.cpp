#include "launcher/job.h"

#include "launcher/store_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <thread>

namespace tessera::launcher {
namespace {

// How often it is asked whether a rank is stopped. A debugger may stop one for a moment.
constexpr std::chrono::seconds kLook{1};
constexpr std::chrono::seconds kToldAfter{1};

}  // namespace

Job::Job(const JobOptions& options, int restart_count, Session& session)
    : options_(options), restart_count_(restart_count), session_(session) {}

Job::~Job() { end_processes(); }

JobOutcome Job::run() {
  start_ranks();
  while (!is_done()) wait_and_handle();
  end_processes();
  for (auto& rank : ranks_) {
    rank.out.finish();
    rank.err.finish();
  }
  if (auto& failure = outcome_.failure) {
    const Rank& rank = ranks_[static_cast<std::size_t>(failure->rank)];
    // Of a rank that was killed from outside stdout tells what went well.
    const bool is_told_by_stdout = rank.err.last_lines().empty() && failure->end.signal != SIGKILL;
    failure->last_lines = is_told_by_stdout ? rank.out.last_lines() : rank.err.last_lines();
  }
  return outcome_;
}

void Job::start_ranks() {
  StoreSocket store = listen_for_store();
  const Descriptor null(checked(::open("/dev/null", O_RDONLY | O_CLOEXEC), "/dev/null"));
  Output& output = session_.output;
  started_at_ = Clock::now();
  for (int rank = 0; rank < options_.ranks; ++rank) {
    const RankIdentity identity{
        .rank = rank,
        .world_size = options_.ranks,
        .restart_count = restart_count_,
        .store = store.address,
        .stopped_timeout =
            std::chrono::duration_cast<std::chrono::milliseconds>(options_.stopped_timeout),
        .listen_fd = store.listener.get()};
    const auto environment = rank_environment(::environ, options_.settings, identity,
                                              std::thread::hardware_concurrency());
    // A terminal can serve one process group at a time, and that is the launcher's.
    const bool inherits_stdin = rank == 0 && ::isatty(STDIN_FILENO) != 1;
    RankProcess process = start_rank({.command = options_.command,
                                      .environment = environment,
                                      .stdin_fd = inherits_stdin ? STDIN_FILENO : null.get(),
                                      .kept_fd = store.listener.get(),
                                      .watcher_fd = session_.watcher.fd(),
                                      .signals = session_.signals});
    const auto prefix = [&](const Sink& sink) {
      return options_.has_prefix ? rank_prefix(rank, sink.is_coloured()) : std::string();
    };
    RankStream out(std::move(process.out), output.out(), prefix(output.out()));
    RankStream err(std::move(process.err), output.err(), prefix(output.err()));
    ranks_.push_back({std::move(process), std::move(out), std::move(err)});
    session_.orphans.exclude(ranks_.back().process.pid);
    exits_.add(ranks_.back().process.pidfd.get(), rank);
    ++running_ranks_;
    // Rank 0 has it; held here as well, it would take connections after rank 0 has died.
    store.listener.reset();
  }
}

void Job::wait_and_handle() {
  std::vector<pollfd> fds{{session_.signals.fd(), POLLIN, 0}, {exits_.fd(), POLLIN, 0}};
  session_.output.add_pending(fds);
  const std::size_t first_stream = fds.size();
  std::vector<RankStream*> streams;
  for (auto& rank : ranks_) {
    for (auto* stream : {&rank.out, &rank.err}) {
      if (!stream->wants_reading()) continue;
      streams.push_back(stream);
      fds.push_back({stream->fd(), POLLIN, 0});
    }
  }
  ::poll(fds.data(), fds.size(), milliseconds_to_deadline());

  // Signals first: a rank that dies of the same ctrl-C has not failed.
  while (const auto signal = session_.signals.next()) handle_signal(*signal);
  handle_exits();
  handle_deadline();
  look_at_stops();
  // One pipe's worth from each stream per turn: a rank that floods cannot starve the others.
  for (std::size_t i = 0; i < streams.size(); ++i) {
    if (fds[first_stream + i].revents != 0) streams[i]->read_some();
  }
  session_.output.write_some();
  if (session_.output.is_broken() && phase_ == Phase::Running) {
    outcome_.signal = SIGPIPE;
    stop(SIGTERM);
  }
}

int Job::milliseconds_to_deadline() const {
  const auto next = deadline_ ? std::min(*deadline_, next_look_) : next_look_;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1 << 30));
}

void Job::handle_signal(int signal) {
  if (signal == SIGCHLD) return look_after_orphans();
  if (ends_job(signal)) return handle_ending_signal(signal);
  forward(signal);
  if (signal == SIGTSTP) {  // ctrl-Z: the launcher stops with its ranks, and continues with them
    ::raise(SIGSTOP);
    forward(SIGCONT);
    for (auto& rank : ranks_) rank.stopped_since.reset();
  }
}

void Job::handle_ending_signal(int signal) {
  if (outcome_.signal == 0) outcome_.signal = signal;
  if (phase_ == Phase::Running) {
    const std::string more = signal == SIGINT ? " (ctrl-C again kills them at once)" : "";
    session_.output.say(signal_name(signal) + ": passed on to all ranks" + more);
    stop(signal);
  } else if (phase_ == Phase::Stopping && signal == SIGINT) {
    deadline_ = Clock::now();
  } else {
    forward(signal);
  }
}

void Job::handle_exits() {
  const auto ended = exits_.take();
  for (const int number : ended) {
    Rank& rank = ranks_[static_cast<std::size_t>(number)];
    rank.has_ended = true;
    --running_ranks_;
    const RankEnd end = end_of(rank.process.pid);
    if (!end.has_failed() || outcome_.failure) continue;
    const bool is_told = phase_ != Phase::Running;
    if (is_told && !end.is_one_of(options_.final_codes)) continue;
    const std::chrono::duration<double> elapsed = Clock::now() - started_at_;
    outcome_.failure = RankFailure{number, end, elapsed.count(), {}, rank.is_stopped_too_long};
    // Ranks that were told already may be waiting for this one to leave first.
    is_told ? forward(SIGTERM) : stop(SIGTERM);
  }
  // The children of the last ranks have become orphans, and no signal tells of that.
  if (running_ranks_ == 0 && !ended.empty()) look_after_orphans();
}

void Job::handle_deadline() {
  if (!deadline_ || Clock::now() < *deadline_) return;
  deadline_.reset();
  phase_ = Phase::Killed;
  outcome_.was_killed = true;
  session_.output.say(laggards());
  forward(SIGKILL);
}

void Job::look_after_orphans() {
  const auto orphans = session_.orphans.reap();
  has_group_orphans_ = std::ranges::any_of(orphans, [&](const auto& orphan) {
    return std::ranges::any_of(ranks_,
                               [&](const Rank& rank) { return rank.process.pid == orphan.group; });
  });
}

void Job::look_at_stops() {
  if (Clock::now() < next_look_) return;
  next_look_ = Clock::now() + kLook;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].has_ended) look_at_stop(static_cast<int>(i), ranks_[i]);
  }
}

void Job::look_at_stop(int number, Rank& rank) {
  const auto name =
      "rank " + std::to_string(number) + " (process " + std::to_string(rank.process.pid) + ")";
  if (stop_of(rank.process.pid) == Stop::None) {
    if (rank.is_stop_told) session_.output.say(name + " goes on");
    rank.stopped_since.reset();
    rank.is_stop_told = false;
    return;
  }
  const auto now = Clock::now();
  if (!rank.stopped_since) rank.stopped_since = now;
  const std::chrono::duration<double> time = now - *rank.stopped_since;
  const auto limit = options_.stopped_timeout;
  const auto seconds = [](double count) {
    std::ostringstream text;
    text << count << " s";
    return text.str();
  };
  if (limit.count() > 0 && time >= limit) {
    session_.output.say(name + " has been stopped for " + seconds(std::floor(time.count())) +
                        "; killed");
    ::kill(-rank.process.pid, SIGKILL);
    rank.is_stopped_too_long = true;
    rank.is_stop_told = false;
  } else if (!rank.is_stop_told && time >= kToldAfter) {
    rank.is_stop_told = true;
    session_.output.say(name + " is stopped (SIGSTOP or a debugger)" +
                        (limit.count() > 0 ? "; unless it goes on it is killed after " +
                                                 seconds(limit.count()) + " (--stopped-timeout)"
                                           : std::string()));
  }
}

void Job::stop(int signal) {
  phase_ = Phase::Stopping;
  stop_signal_ = signal;
  deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(options_.grace);
  forward(signal);
  // A stopped process gets the signal when it goes on; one in a debugger's hands would not.
  for (const auto& rank : ranks_) {
    const Stop stop = rank.has_ended ? Stop::None : stop_of(rank.process.pid);
    if (stop != Stop::None) ::kill(-rank.process.pid, stop == Stop::BySignal ? SIGCONT : SIGKILL);
  }
}

void Job::forward(int signal) {
  for (const auto& rank : ranks_) ::kill(-rank.process.pid, signal);
}

bool Job::is_done() const {
  if (running_ranks_ > 0) return false;
  // A wrapper script dies of the signal at once; the program in it may need the grace to save.
  return phase_ != Phase::Stopping || !has_group_orphans_;
}

std::string Job::laggards() const {
  std::ostringstream text;
  const char* separator = running_ranks_ == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].has_ended) continue;
    text << separator << i;
    separator = ", ";
  }
  if (running_ranks_ == 0) text << "processes that the ranks started";
  text << " had not ended after " << signal_name(stop_signal_) << "; killed";
  return text.str();
}

void Job::end_processes() {
  for (auto& rank : ranks_) {
    if (rank.process.pid < 0) continue;
    ::kill(-rank.process.pid, SIGKILL);
    ::waitpid(rank.process.pid, nullptr, 0);
    session_.orphans.include(rank.process.pid);
    rank.process.pid = -1;
  }
  session_.orphans.kill_all();
  session_.watcher.forget_groups();
}

}  // namespace tessera::launcher
