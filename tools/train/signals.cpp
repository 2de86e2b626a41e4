#include "train/signals.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>

namespace tessera::train {
namespace {

// Written by the handler, `number` last and once; lock-free, so that a handler may.
std::atomic<int> number = 0;
std::atomic<double> when = 0;
std::atomic<int64_t> sender = 0;
std::atomic<int> interrupts = 0;
static_assert(std::atomic<double>::is_always_lock_free &&
              std::atomic<int64_t>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

void note(int signal, siginfo_t* facts, void* /*context*/) {
  if (signal == SIGINT && interrupts++ > 0) {
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
  }
  if (number != 0) return;
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  when = static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
  const bool is_sent = facts->si_code == SI_USER || facts->si_code == SI_QUEUE;
  sender = is_sent && facts->si_pid != getppid() ? facts->si_pid : 0;
  number = signal;
}

bool is_ignored(int signal) {
  struct sigaction action = {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

void note_signals() {
  struct sigaction action = {};
  action.sa_sigaction = note;
  action.sa_flags = SA_RESTART | SA_SIGINFO;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&action.sa_mask, signal);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    if (signal != SIGHUP || !is_ignored(signal)) sigaction(signal, &action, nullptr);
  }
}

NotedSignal noted_signal() {
  const int noted = number;
  return noted == 0 ? NotedSignal{} : NotedSignal{noted, when, sender};
}

const char* signal_name(int number) {
  return number == SIGINT ? "SIGINT" : number == SIGHUP ? "SIGHUP" : "SIGTERM";
}

}  // namespace tessera::train
