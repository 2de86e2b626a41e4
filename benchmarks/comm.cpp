// How fast do ranks talk? Every backend in one run, interleaved, against gloo and against memcpy.
#include <tessera/comm.h>

#include "comm_cases.h"
#include "numbers.h"
#include "statistics.h"
#include "table.h"

#include <CLI/CLI.hpp>
#include <sys/resource.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <map>
#include <optional>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::vector<std::string> backends = {"shm", "gloo"};
  std::vector<std::string> ops = comm_ops();
  std::vector<std::string> dtypes = {"float32"};
  std::vector<int64_t> sizes = {4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20};
  int repeats = 7;
  double wait_seconds = 5;
  std::string csv;
};

constexpr int64_t kMostBytes = int64_t{1} << 40;

const std::map<std::string, c10::ScalarType> kDtypes = {{"float32", at::kFloat},
                                                        {"float64", at::kDouble},
                                                        {"float16", at::kHalf},
                                                        {"bfloat16", at::kBFloat16}};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Runs per timed batch: enough for the clock, few enough for a slow backend.
int batch_of(int64_t bytes) { return bytes <= (64 << 10) ? 200 : bytes <= (1 << 20) ? 20 : 2; }

double time_batch(const CommCase& what, int count) {
  barrier();
  const auto start = Clock::now();
  for (int i = 0; i < count; ++i) what.run();
  return seconds_since(start) / count;
}

/// One rank alone copies, as often as a batch runs: the best the machine could do for one message.
double time_memcpy(int64_t bytes, int count) {
  static std::map<int64_t, std::pair<at::Tensor, at::Tensor>> buffers;
  auto& [from, to] = buffers[bytes];
  if (!from.defined()) {
    from = at::ones({bytes}, at::kByte);
    to = at::zeros({bytes}, at::kByte);
  }
  double seconds = 0;
  barrier();
  if (rank() == 0) {
    const auto start = Clock::now();
    for (int i = 0; i < count; ++i) std::memcpy(to.data_ptr(), from.data_ptr(), bytes);
    seconds = seconds_since(start) / count;
  }
  barrier();
  return seconds;
}

/// What rank 0 prints; the others' lines go nowhere.
class Rank0Table {
 public:
  explicit Rank0Table(const std::string& path) {
    if (rank() == 0) table_.emplace("comm", path);
  }
  void add(const std::string& line) {
    if (table_) table_->add(line);
  }

 private:
  std::optional<Table> table_;
};

struct Subject {
  std::string name;
  CommCase what;
  std::vector<double> seconds = {};
};

std::string format_row(const std::string& op, const std::string& dtype, int64_t bytes,
                       const Subject& subject, double gloo, double copy) {
  const double seconds = median(subject.seconds);
  const auto ratio = [&](double other) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.2f", other / seconds);
    return other > 0 ? std::string(text) : std::string();
  };
  char text[256];
  std::snprintf(text, sizeof(text), "%s,%s,%ld,%d,%s,%.2f,%.3f,%s,%s", op.c_str(), dtype.c_str(),
                static_cast<long>(bytes), world_size(), subject.name.c_str(), seconds * 1e6,
                static_cast<double>(bytes) / seconds / 1e9, ratio(gloo).c_str(),
                ratio(copy).c_str());
  return text;
}

/// What c10d has, without the comparison of calls that goes ahead of the data.
constexpr const char* kBareGloo = "gloo (calls unchecked)";

void measure(const Settings& settings, const std::map<std::string, Group>& groups,
             const std::string& op, const std::string& dtype, int64_t bytes, Rank0Table& table) {
  std::vector<Subject> subjects;
  for (const auto& backend : settings.backends) {
    const auto& group = groups.at(backend);
    subjects.push_back({backend, make_case(op, kDtypes.at(dtype), bytes, group, false)});
    if (backend == "shm" && bytes > 0) {
      subjects.push_back(
          {"shm (shared tensors)", make_case(op, kDtypes.at(dtype), bytes, group, true)});
    }
    if (backend == "gloo") {
      const auto& bare = groups.at(kBareGloo);
      subjects.push_back({kBareGloo, make_case(op, kDtypes.at(dtype), bytes, bare, false)});
    }
  }
  for (auto& subject : subjects) subject.what.check();
  const int count = batch_of(bytes);
  std::vector<double> copies;
  for (int repeat = 0; repeat <= settings.repeats; ++repeat) {
    // Interleaved, so that a busy moment of the machine hits all alike. The first one only warms
    // up.
    for (auto& subject : subjects) {
      const double seconds = time_batch(subject.what, count);
      if (repeat > 0) subject.seconds.push_back(seconds);
    }
    if (bytes > 0) copies.push_back(time_memcpy(bytes, count));
  }
  double gloo = 0;
  for (const auto& subject : subjects) {
    if (subject.name == "gloo") gloo = median(subject.seconds);
  }
  for (const auto& subject : subjects) {
    table.add(format_row(op, dtype, bytes, subject, gloo, copies.empty() ? 0 : median(copies)));
  }
}

/// Processor time of a rank that waits for its peer. In the table: microseconds of it as `us`.
void measure_waiting(const Settings& settings, const Group& group, const std::string& backend,
                     Rank0Table& table) {
  const auto used = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
  };
  barrier(group);
  const double before = used();
  if (rank() != 0)
    std::this_thread::sleep_for(std::chrono::duration<double>(settings.wait_seconds));
  barrier(group);
  char text[128];
  std::snprintf(text, sizeof(text), "wait_%gs_cpu,-,0,%d,%s,%.0f,,,", settings.wait_seconds,
                world_size(), backend.c_str(), (used() - before) * 1e6);
  table.add(text);
}

void run(const Settings& settings) {
  std::vector<int> everybody(world_size());
  for (int i = 0; i < world_size(); ++i) everybody[i] = i;
  std::map<std::string, Group> groups;
  for (const auto& backend : settings.backends)
    groups[backend] = new_group(everybody, {.backend = backend});
  if (groups.contains("gloo"))
    groups[kBareGloo] = new_group(everybody, {.backend = "gloo", .check_calls = false});
  Rank0Table table(settings.csv);
  table.add("op,dtype,bytes,ranks,backend,us,gbps,vs_gloo,vs_memcpy");
  for (const auto& op : settings.ops) {
    for (const auto& dtype : settings.dtypes) {
      const auto sizes = op == "barrier" ? std::vector<int64_t>{0} : settings.sizes;
      for (const auto bytes : sizes) measure(settings, groups, op, dtype, bytes, table);
    }
  }
  if (settings.wait_seconds <= 0 || world_size() == 1) return;
  for (const auto& backend : settings.backends)
    measure_waiting(settings, groups.at(backend), backend, table);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Collectives of every backend against gloo and memcpy; results are checked before they are "
      "timed",
      "tessera bench comm");
  Settings settings;
  bool list = false;
  app.add_option("--backends", settings.backends, "shm, gloo, …")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--ops", settings.ops, "collectives")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::IsMember(comm_ops()));
  app.add_option("--dtypes", settings.dtypes, "element types")
      ->delimiter(',')
      ->capture_default_str()
      ->check(CLI::IsMember(kDtypes));
  // Two options: CLI11 does not tell which name of one was typed.
  auto* sizes = tool::add_numbers(app, "--sizes", settings.sizes, 0, kMostBytes, "bytes");
  tool::add_numbers(app, "--bytes", settings.sizes, 0, kMostBytes, "the same")->excludes(sizes);
  tool::add_number(app, "--repeats", settings.repeats, 1, 1'000'000,
                   "timed batches; the median counts");
  tool::add_number(app, "--wait", settings.wait_seconds, 0, 3600,
                   "seconds of the waiting test; 0: none");
  app.add_option("--csv", settings.csv, "also write the table to this file");
  app.add_flag("--list", list, "print the collectives and stop");
  if (const auto code = parse_words(app, argc, argv)) return *code;
  if (list) {
    if (is_other_rank()) return 0;
    for (const auto& op : comm_ops()) std::cout << op << "\n";
    return 0;
  }
  return run_question("comm", [&] {
    init();
    run(settings);
    shutdown();
  });
}
