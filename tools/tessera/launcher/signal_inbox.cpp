#include "launcher/signal_inbox.h"

#include <sys/signalfd.h>

#include <algorithm>
#include <cstring>

namespace tessera::launcher {
namespace {

constexpr int kEndingSignals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
constexpr int kOtherSignals[] = {SIGUSR1, SIGUSR2, SIGTSTP};

bool is_ignored(int signal) {
  struct sigaction action;
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

SignalInbox::SignalInbox() {
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, SIGCHLD);
  // A blocked signal is queued even if it is ignored, hence the question.
  for (const int signal : kEndingSignals) {
    if (!is_ignored(signal)) sigaddset(&mask, signal);
  }
  for (const int signal : kOtherSignals) {
    if (!is_ignored(signal)) sigaddset(&mask, signal);
  }
  fd_.reset(checked(::signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK), "signalfd"));
  ::sigprocmask(SIG_BLOCK, &mask, &old_mask_);

  struct sigaction ignore{};
  ignore.sa_handler = SIG_IGN;  // a reader that left or a file at its limit is an error of write()
  ::sigaction(SIGPIPE, &ignore, &old_pipe_);
  ::sigaction(SIGXFSZ, &ignore, &old_file_size_);
  struct sigaction notice{};
  notice.sa_handler = SIG_DFL;  // an inherited SIG_IGN would lose the exit codes
  notice.sa_flags = SA_NOCLDSTOP;
  ::sigaction(SIGCHLD, &notice, &old_child_);
}

SignalInbox::~SignalInbox() {
  // What came too late for the job must not strike the launcher once it is unblocked.
  while (next()) {
  }
  restore();
}

std::optional<int> SignalInbox::next() {
  signalfd_siginfo siginfo;
  if (::read(fd_.get(), &siginfo, sizeof(siginfo)) != sizeof(siginfo)) return std::nullopt;
  return static_cast<int>(siginfo.ssi_signo);
}

void SignalInbox::restore() const noexcept {
  ::sigaction(SIGPIPE, &old_pipe_, nullptr);
  ::sigaction(SIGXFSZ, &old_file_size_, nullptr);
  ::sigaction(SIGCHLD, &old_child_, nullptr);
  ::sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
}

bool ends_job(int signal) {
  return std::ranges::find(kEndingSignals, signal) != std::end(kEndingSignals);
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? std::string("SIG") + name : "signal " + std::to_string(signal);
}

}  // namespace tessera::launcher
