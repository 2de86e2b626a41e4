#include "support/reused_ranks.h"

#include "support/rank_run.h"
#include "support/temporary_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <list>
#include <sstream>
#include <system_error>
#include <utility>

namespace tessera::testing {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Sets of processes that wait for their next run: tests take turns with 2 and 4 ranks.
constexpr size_t kMostCrews = 3;
constexpr const char* kFolderVariable = "TESSERA_TEST_ORDERS";
constexpr const char* kEnd = "end";
constexpr std::chrono::seconds kGraceAtEnd{30};
constexpr size_t kReportedAtEnd = 4000;

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), "reused ranks: " + what);
}

std::filesystem::path orders_of(const std::filesystem::path& folder, int rank) {
  return folder / ("orders." + std::to_string(rank));
}
std::filesystem::path answers_of(const std::filesystem::path& folder, int rank) {
  return folder / ("answers." + std::to_string(rank));
}
std::filesystem::path log_of(const std::filesystem::path& folder, int rank) {
  return folder / ("rank." + std::to_string(rank) + ".log");
}

class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags)
      : number_(open(path.c_str(), flags | O_CLOEXEC, 0600)) {
    if (number_ < 0) fail("open " + path.string());
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;

  int number() const { return number_; }
  void write_line(const std::string& text) const {
    const std::string line = text + "\n";
    if (write(number_, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      fail("write '" + text + "'");
  }

 private:
  int number_;
};

/// A process with a pipe each way. The parent holds both ends of the pipes, so that nobody waits
/// for the other to open them; that a process has ended is told by itself.
struct Worker {
  Descriptor orders;
  Descriptor answers;
  Subprocess process;

  /// The code of the run that it has come to the end of.
  std::optional<ExitStatus> answer() const {
    char text[16] = {};
    if (read(answers.number(), text, sizeof text - 1) <= 0) return std::nullopt;
    return ExitStatus{.code = std::atoi(text), .signal = 0};
  }
};

/// What processes can't change once they run.
struct Circumstances {
  std::vector<RankEnvironment> ranks;
  std::vector<std::string> parent;

  Circumstances(int n, const RankOptions& options) {
    for (int rank = 0; rank < n; ++rank) ranks.push_back(rank_environment(options, rank, n));
    for (char** entry = environ; *entry != nullptr; ++entry) parent.emplace_back(*entry);
  }
  bool operator==(const Circumstances&) const = default;
};

/// The processes of one world after the other.
class Crew {
 public:
  explicit Crew(Circumstances circumstances) : circumstances_(std::move(circumstances)) {
    for (size_t rank = 0; rank < circumstances_.ranks.size(); ++rank) start(static_cast<int>(rank));
  }

  bool fits(const Circumstances& wanted) const { return circumstances_ == wanted; }
  /// All processes wait for the next run.
  bool usable() const { return usable_; }
  std::vector<RankEnd> run(const std::string& test, int call, const std::filesystem::path& folder,
                           milliseconds limit);
  /// Lets the processes exit. What went wrong with that: destructors and teardown come now.
  std::string end();

 private:
  void start(int rank);
  bool all_ended(std::vector<RankEnd>& ends);
  void wait(milliseconds most) const;
  void kill_those_left(std::vector<RankEnd>& ends);

  TemporaryFolder folder_;
  Circumstances circumstances_;
  std::vector<Worker> workers_;
  bool usable_ = true;
};

void Crew::start(int rank) {
  RankEnvironment environment = circumstances_.ranks[rank];
  environment[kFolderVariable] = folder_.path().string();
  for (const auto& pipe : {orders_of(folder_.path(), rank), answers_of(folder_.path(), rank)}) {
    if (mkfifo(pipe.c_str(), 0600) != 0) fail("mkfifo " + pipe.string());
  }
  workers_.push_back({.orders = {orders_of(folder_.path(), rank), O_RDWR},
                      .answers = {answers_of(folder_.path(), rank), O_RDWR | O_NONBLOCK},
                      .process = Subprocess({.arguments = rank_arguments(""),
                                             .environment = std::move(environment),
                                             .output = log_of(folder_.path(), rank)})});
}

/// Takes what ranks have answered, or how they died; true once that is known of all.
bool Crew::all_ended(std::vector<RankEnd>& ends) {
  bool all = true;
  for (size_t rank = 0; rank < workers_.size(); ++rank) {
    RankEnd& end = ends[rank];
    if (!end.status) end.status = workers_[rank].answer();
    if (!end.status) {
      end.status = workers_[rank].process.wait(milliseconds(0));
      usable_ = usable_ && !end.status;
    }
    usable_ = usable_ && !end.failed();
    all = all && end.status;
  }
  return all;
}

void Crew::wait(milliseconds most) const {
  std::vector<pollfd> descriptors;
  for (const Worker& worker : workers_)
    descriptors.push_back({.fd = worker.answers.number(), .events = POLLIN, .revents = 0});
  // Deaths are looked for in between.
  poll(descriptors.data(), descriptors.size(),
       static_cast<int>(std::min(most, milliseconds(20)).count()));
}

void Crew::kill_those_left(std::vector<RankEnd>& ends) {
  usable_ = false;
  // At this signal a rank writes down its last collectives: the report should tell where it hung.
  for (size_t rank = 0; rank < workers_.size(); ++rank) {
    if (!ends[rank].status) workers_[rank].process.signal(SIGUSR2);
  }
  for (size_t rank = 0; rank < workers_.size(); ++rank) {
    if (ends[rank].status) continue;
    Subprocess& process = workers_[rank].process;
    process.wait(milliseconds(500));
    process.signal(SIGKILL);
    ends[rank].status = process.wait(std::chrono::seconds(10));
    ends[rank].killed_by_harness = true;
  }
}

std::vector<RankEnd> Crew::run(const std::string& test, int call,
                               const std::filesystem::path& folder, milliseconds limit) {
  auto deadline = steady_clock::now() + limit;
  for (const Worker& worker : workers_)
    worker.orders.write_line(test + "\t" + std::to_string(call) + "\t" + folder.string());
  std::vector<RankEnd> ends(workers_.size());
  bool grace_given = false;
  while (!all_ended(ends)) {
    if (!usable_ && !grace_given) {
      deadline = std::min(deadline, steady_clock::now() + kGraceAfterFailure);
      grace_given = true;
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) {
      kill_those_left(ends);
      break;
    }
    wait(left);
  }
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    std::ifstream log(log_of(folder, static_cast<int>(rank)), std::ios::binary);
    ends[rank].output = {std::istreambuf_iterator<char>(log), std::istreambuf_iterator<char>()};
  }
  return ends;
}

std::string Crew::end() {
  for (const Worker& worker : workers_) worker.orders.write_line(kEnd);
  std::string complaints;
  for (size_t rank = 0; rank < workers_.size(); ++rank) {
    Subprocess& process = workers_[rank].process;
    const auto status = process.wait(kGraceAtEnd);
    if (status && status->ok()) continue;
    const std::string output = process.output();
    complaints += "rank " + std::to_string(rank) + " of " + std::to_string(workers_.size()) +
                  " (process for several tests): " +
                  (status ? "ended by " + status->text() : "still running") +
                  " after its last test; the end of its output:\n" +
                  output.substr(output.size() - std::min(output.size(), kReportedAtEnd)) + "\n";
  }
  return complaints;
}

/// Those that wait for a run, the last used ones last.
std::list<Crew>& crews() {
  static std::list<Crew> all;
  return all;
}

std::string complaints;  // of crews that had to go for others

/// Moves the crew to the end of the list.
Crew& crew_for(Circumstances circumstances) {
  auto& all = crews();
  const auto found =
      std::ranges::find_if(all, [&](const Crew& crew) { return crew.fits(circumstances); });
  if (found != all.end()) {
    all.splice(all.end(), all, found);
    return all.back();
  }
  if (all.size() == kMostCrews) {
    complaints += all.front().end();
    all.pop_front();
  }
  return all.emplace_back(std::move(circumstances));
}

/// Unwinds a test whose run is over. Not a std::exception: tests catch those.
struct EndOfRun {};

std::optional<int> end_code;  // of the run that this rank is in

std::filesystem::path crew_folder() { return std::getenv(kFolderVariable); }

/// What the process prints goes to this file from now on.
void print_to(const std::filesystem::path& file) {
  std::cout.flush();
  std::fflush(stdout);
  const Descriptor log(file, O_WRONLY | O_CREAT | O_APPEND);
  for (const int output : {STDOUT_FILENO, STDERR_FILENO}) {
    if (dup2(log.number(), output) < 0) fail("dup2 " + file.string());
  }
}

std::string read_line(const Descriptor& from) {
  std::string line;
  char next = 0;
  while (read(from.number(), &next, 1) == 1 && next != '\n') line += next;
  return line;
}

}  // namespace

bool reuses_ranks(const RankOptions& options) {
  const char* wanted = std::getenv("TESSERA_REUSE_RANKS");
  return wanted != nullptr && std::string(wanted) == "1" && !options.fresh &&
         options.may_die.empty();
}

void run_reused(const std::string& test, int call, int n, const RankOptions& options) {
  const TemporaryFolder folder;
  Crew& crew = crew_for({n, options});
  const auto ends = crew.run(test, call, folder.path(), options.deadline);
  if (!crew.usable()) crews().pop_back();
  report_ends(ends);
}

void end_reused_ranks() {
  for (Crew& crew : crews()) complaints += crew.end();
  crews().clear();
  const std::string found = std::exchange(complaints, "");
  if (!found.empty()) ADD_FAILURE() << found;
}

bool is_reused_rank() { return std::getenv(kFolderVariable) != nullptr; }

int serve_runs() {
  const ChildIdentity own = *child_identity();
  const Descriptor orders(orders_of(crew_folder(), own.rank), O_RDONLY);
  const Descriptor answers(answers_of(crew_folder(), own.rank), O_WRONLY);
  while (true) {
    const std::string order = read_line(orders);
    if (order.empty() || order == kEnd) return 0;
    std::istringstream fields(order);
    std::string test;
    std::string call;
    std::string folder;
    std::getline(fields, test, '\t');
    std::getline(fields, call, '\t');
    std::getline(fields, folder);
    print_to(log_of(folder, own.rank));
    set_child_identity({.rank = own.rank,
                        .world_size = own.world_size,
                        .call = std::stoi(call),
                        .folder = folder});
    end_code.reset();
    GTEST_FLAG_SET(filter, test);
    [[maybe_unused]] const int unwound = RUN_ALL_TESTS();  // counts EndOfRun as a failure
    if (!end_code) end_code = say_not_reached();
    print_to(log_of(crew_folder(), own.rank));
    answers.write_line(std::to_string(*end_code));
  }
}

void end_reused_run(int code) {
  end_code = code;
  // What gtest says about the exception is no part of the run's output.
  print_to(log_of(crew_folder(), child_identity()->rank));
  throw EndOfRun{};
}

}  // namespace tessera::testing
