#pragma once

#include "launcher/descriptor.h"

#include <signal.h>

#include <optional>
#include <string>

namespace tessera::launcher {

/// Turns the signals sent to the launcher into a descriptor to poll, for as long as it lives.
/// Signals that were ignored when it was made (nohup, background jobs of a script) stay ignored.
class SignalInbox {
 public:
  SignalInbox();
  ~SignalInbox();
  SignalInbox(const SignalInbox&) = delete;
  SignalInbox& operator=(const SignalInbox&) = delete;

  int fd() const { return fd_.get(); }

  /// The next signal that has come, if any; never waits.
  std::optional<int> next();

  /// In a forked child: puts mask and dispositions back as the launcher found them.
  void restore() const noexcept;

 private:
  Descriptor fd_;
  sigset_t old_mask_;
  struct sigaction old_pipe_;
  struct sigaction old_file_size_;
  struct sigaction old_child_;
};

/// Whether the signal asks the whole job to end: ctrl-C, kill, a closed terminal, ctrl-\.
bool ends_job(int signal);

/// "SIGTERM", or "signal 64" for those without a name.
std::string signal_name(int signal);

}  // namespace tessera::launcher
