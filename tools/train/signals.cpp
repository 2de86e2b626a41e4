#include "train/signals.h"

#include <csignal>

namespace tessera::train {
namespace {

volatile std::sig_atomic_t noted = 0;

void note(int number) {
  if (noted == SIGINT && number == SIGINT) {
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
  }
  noted = number;
}

}  // namespace

void note_signals() {
  struct sigaction action = {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

int noted_signal() { return noted; }

}  // namespace tessera::train
