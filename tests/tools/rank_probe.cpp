// A rank for the launcher's tests: does one thing that a shell script cannot do, or not in time.

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

int number(const char* variable) { return std::atoi(std::getenv(variable)); }

/// Rank 0 accepts one connection from each other rank on the socket it has inherited.
int meet_at_store() {
  const int others = number("TESSERA_WORLD_SIZE") - 1;
  if (number("TESSERA_RANK") == 0) {
    const int listener = number("TESSERA_STORE_LISTEN_FD");
    for (int i = 0; i < others; ++i) {
      if (::accept(listener, nullptr, nullptr) < 0) return 1;
    }
    std::printf("accepted %d\n", others);
    return 0;
  }
  if (std::getenv("TESSERA_STORE_LISTEN_FD") != nullptr) return 2;
  const std::string store = std::getenv("TESSERA_STORE");
  const std::string start = "unix://@";
  if (!store.starts_with(start)) return 3;
  const std::string name = store.substr(start.size());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int connection = ::socket(AF_UNIX, SOCK_STREAM, 0);
  return ::connect(connection, reinterpret_cast<sockaddr*>(&address), length) == 0 ? 0 : 4;
}

/// One line of so many letters, 'a' for rank 0.
int write_long_line(std::size_t length) {
  const std::string line(length, static_cast<char>('a' + number("TESSERA_RANK")));
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::putchar('\n');
  return 0;
}

/// So many lines, to stdout and stderr in turn, in writes that end anywhere in a line.
int write_many_lines(int count) {
  static char out_buffer[1000];
  static char err_buffer[777];
  std::setvbuf(stdout, out_buffer, _IOFBF, sizeof(out_buffer));
  std::setvbuf(stderr, err_buffer, _IOFBF, sizeof(err_buffer));
  const std::string filler(static_cast<std::size_t>(20 + number("TESSERA_RANK")), '=');
  for (int i = 0; i < count; ++i) {
    std::fprintf(stdout, "out %d %s|\n", i, filler.c_str());
    std::fprintf(stderr, "err %d %s|\n", i, filler.c_str());
  }
  return 0;
}

/// Every byte value, without a newline at the end.
int write_all_bytes() {
  for (int byte = 0; byte < 256; ++byte) std::putchar(byte);
  std::putchar('x');
  return 0;
}

/// Names each signal that comes on stdout and in the file, if one is given; SIGTERM ends it.
int name_signals(const char* path) {
  sigset_t mask;
  sigemptyset(&mask);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT}) {
    sigaddset(&mask, signal);
  }
  ::sigprocmask(SIG_BLOCK, &mask, nullptr);
  std::FILE* file = path != nullptr ? std::fopen(path, "w") : nullptr;
  std::printf("ready\n");
  std::fflush(stdout);
  for (int signal = 0; signal != SIGTERM;) {
    ::sigwait(&mask, &signal);
    std::printf("SIG%s\n", ::sigabbrev_np(signal));
    std::fflush(stdout);
    if (file != nullptr) std::fprintf(file, "SIG%s\n", ::sigabbrev_np(signal));
    if (file != nullptr) std::fflush(file);
  }
  return 0;
}

/// On SIGTERM takes as long to save as it takes a line to come through the named pipe.
int save_at_end(const char* path) {
  sigset_t mask;
  sigemptyset(&mask);
  sigaddset(&mask, SIGTERM);
  ::sigprocmask(SIG_BLOCK, &mask, nullptr);
  std::printf("ready\n");
  std::fflush(stdout);
  int signal = 0;
  ::sigwait(&mask, &signal);
  std::FILE* release = std::fopen(path, "r");
  if (release == nullptr || std::fgetc(release) == EOF) return 1;
  std::printf("saved\n");
  return 0;
}

/// Ignores every request to end.
int persist() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) ::signal(signal, SIG_IGN);
  std::printf("pid %d\n", ::getpid());
  std::fflush(stdout);
  for (;;) ::pause();
}

/// Leaves a process in a session of its own that holds the rank's output open.
int leave_daemon() {
  int ready[2];
  if (::pipe(ready) != 0) return 1;
  if (::fork() == 0) {
    ::setsid();
    if (::fork() != 0) ::_exit(0);
    std::printf("daemon %d\n", ::getpid());
    std::fflush(stdout);
    ::close(ready[1]);
    for (;;) ::pause();
  }
  ::close(ready[1]);
  char byte;
  return ::read(ready[0], &byte, 1) == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string action = argc > 1 ? argv[1] : "";
  if (action == "store") return meet_at_store();
  if (action == "line") return write_long_line(std::stoul(argv[2]));
  if (action == "lines") return write_many_lines(std::stoi(argv[2]));
  if (action == "bytes") return write_all_bytes();
  if (action == "signals") return name_signals(argc > 2 ? argv[2] : nullptr);
  if (action == "save") return save_at_end(argv[2]);
  if (action == "persist") return persist();
  if (action == "daemon") return leave_daemon();
  if (action == "words") {
    for (int i = 2; i < argc; ++i) std::printf("<%s>\n", argv[i]);
    return 0;
  }
  std::fprintf(stderr, "rank_probe: unknown action '%s'\n", action.c_str());
  return 64;
}
