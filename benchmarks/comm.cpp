// How fast do ranks talk? Every backend in one run, interleaved, against gloo and against a copy in
// memory.
#include <tessera/comm.h>

#include "comm_c10d_gloo.h"
#include "comm_cases.h"
#include "numbers.h"
#include "shared_gpu.h"
#include "statistics.h"
#include "table.h"

#include <CLI/CLI.hpp>
#include <sys/resource.h>
#include <torch/cuda.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <thread>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::string device = "cpu";
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

/// Runs per timed batch: enough for the clock, few enough for a slow backend. Ranks that share a
/// GPU take turns on it, in slices of milliseconds.
int batch_of(int64_t bytes, c10::Device device) {
  const int most = device.is_cpu() ? 200 : 20;
  return bytes <= (64 << 10) ? most : bytes <= (1 << 20) ? std::min(most, 20) : 2;
}

/// Returns when the device has done all that it was given.
void synchronize(c10::Device device) {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
}

double time_batch(const CommCase& what, int count, c10::Device device) {
  synchronize(device);
  barrier();
  const auto start = Clock::now();
  for (int i = 0; i < count; ++i) {
    what.run();
    synchronize(device);
  }
  return seconds_since(start) / count;
}

/// One rank alone copies, as often as a batch runs: the best the machine could do for one message.
class Copier {
 public:
  Copier(int64_t bytes, c10::Device device)
      : from_(at::ones({bytes}, at::TensorOptions(at::kByte).device(device))),
        to_(at::zeros_like(from_)) {}

  double time(int count) {
    double seconds = 0;
    synchronize(from_.device());
    barrier();
    if (rank() == 0) {
      const auto start = Clock::now();
      for (int i = 0; i < count; ++i) copy();
      seconds = seconds_since(start) / count;
    }
    barrier();
    return seconds;
  }

 private:
  void copy() {
    if (from_.is_cpu()) {
      std::memcpy(to_.data_ptr(), from_.data_ptr(), from_.nbytes());
    } else {
      to_.copy_(from_);
      synchronize(from_.device());
    }
  }

  at::Tensor from_, to_;
};

struct Subject {
  std::string name;
  CommCase what;
  std::vector<double> seconds = {};  // by repeat; those of one repeat were measured side by side
};

/// What is measured at a time.
struct Question {
  std::string op;
  std::string dtype;
  int64_t bytes;
  c10::Device device;
};

/// What rank 0 prints, and the bounds of ratios in FILE.bounds.txt; the others' go nowhere.
class Rank0Table {
 public:
  explicit Rank0Table(const std::string& path) {
    if (rank() != 0) return;
    table_.emplace("comm", path);
    if (!path.empty()) bounds_.open(std::filesystem::path(path).replace_extension(".bounds.txt"));
  }
  void add(const std::string& line) {
    if (table_) table_->add(line);
  }
  void add_bounds(const std::string& line) {
    if (bounds_.is_open()) bounds_ << line << std::endl;
  }

 private:
  std::optional<Table> table_;
  std::ofstream bounds_;
};

std::string format_row(const Question& question, const Subject& subject, double gloo, double copy) {
  const double seconds = median(subject.seconds);
  const auto ratio = [&](double other) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.2f", other / seconds);
    return other > 0 ? std::string(text) : std::string();
  };
  char text[256];
  std::snprintf(text, sizeof(text), "%s,%s,%ld,%d,%s,%s,%.2f,%.3f,%s,%s", question.op.c_str(),
                question.dtype.c_str(), static_cast<long>(question.bytes), world_size(),
                c10::DeviceTypeName(question.device.type(), /*lower_case=*/true).c_str(),
                subject.name.c_str(), seconds * 1e6,
                static_cast<double>(question.bytes) / seconds / 1e9, ratio(gloo).c_str(),
                ratio(copy).c_str());
  return text;
}

std::string format_bounds(const Question& question, const Subject& subject, const Subject& gloo) {
  return c10::str(question.op, " of ", question.bytes, " bytes of ", question.dtype, " on ",
                  c10::DeviceTypeName(question.device.type(), /*lower_case=*/true), ", ",
                  world_size(), " ranks, ", subject.name, " against gloo, medians over ",
                  subject.seconds.size(), " repeats: ratio ",
                  describe_median(divide(gloo.seconds, subject.seconds)));
}

/// Ours, without the comparison of calls that goes ahead of the data.
constexpr const char* kBareGloo = "gloo (calls unchecked)";
constexpr const char* kC10dGloo = "c10d_gloo";  // libtorch's

std::vector<Subject> make_subjects(const Settings& settings,
                                   const std::map<std::string, Group>& groups,
                                   const Question& question) {
  std::vector<Subject> subjects;
  const auto add = [&](const std::string& name, const Group& group, bool shared) {
    subjects.push_back({name, make_case(question.op, kDtypes.at(question.dtype), question.bytes,
                                        group, question.device, shared)});
  };
  for (const auto& backend : settings.backends) {
    add(backend, groups.at(backend), false);
    if (backend == "shm" && question.bytes > 0 && question.device.is_cpu())
      add("shm (shared tensors)", groups.at(backend), true);
    if (backend != "gloo") continue;
    add(kBareGloo, groups.at(kBareGloo), false);
    if (question.op == "all_reduce") add(kC10dGloo, groups.at(kC10dGloo), false);
  }
  return subjects;
}

void measure(const Settings& settings, const std::map<std::string, Group>& groups,
             const Question& question, Rank0Table& table) {
  auto subjects = make_subjects(settings, groups, question);
  for (auto& subject : subjects) subject.what.check();
  const int count = batch_of(question.bytes, question.device);
  Copier copier(question.bytes, question.device);
  std::vector<double> copies;
  for (int repeat = 0; repeat <= settings.repeats; ++repeat) {
    // Interleaved, so that a busy moment of the machine hits all alike. The first one only warms
    // up.
    for (auto& subject : subjects) {
      const double seconds = time_batch(subject.what, count, question.device);
      if (repeat > 0) subject.seconds.push_back(seconds);
    }
    if (question.bytes > 0) copies.push_back(copier.time(count));
  }
  const auto gloo = std::ranges::find(subjects, "gloo", &Subject::name);
  for (const auto& subject : subjects) {
    table.add(format_row(question, subject, gloo == subjects.end() ? 0 : median(gloo->seconds),
                         copies.empty() ? 0 : median(copies)));
    if (gloo != subjects.end() && &subject != &*gloo)
      table.add_bounds(format_bounds(question, subject, *gloo));
  }
}

/// Processor time of a rank that waits for its peer. In the table: microseconds of it as `us`.
void measure_waiting(const Settings& settings, const Group& group, const std::string& backend,
                     c10::Device device, Rank0Table& table) {
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
  std::snprintf(text, sizeof(text), "wait_%gs_cpu,-,0,%d,%s,%s,%.0f,,,", settings.wait_seconds,
                world_size(), c10::DeviceTypeName(device.type(), /*lower_case=*/true).c_str(),
                backend.c_str(), (used() - before) * 1e6);
  table.add(text);
}

c10::Device device_of_rank(const Settings& settings) {
  if (settings.device == "cpu") return at::kCPU;
  const auto devices = static_cast<int>(torch::cuda::device_count());
  return {at::kCUDA, static_cast<c10::DeviceIndex>(local_rank() % devices)};
}

void require_support(const Settings& settings, c10::Device device) {
  for (const auto& backend : settings.backends) {
    for (const auto& dtype : settings.dtypes) {
      TORCH_CHECK_VALUE(supports(backend, device.type(), kDtypes.at(dtype)),
                        "bench comm: expected --backends that take ", dtype, " tensors on ",
                        settings.device, ", got ", backend,
                        ", which does not in this build; leave it out");
    }
  }
}

std::map<std::string, Group> make_groups(const Settings& settings) {
  std::vector<int> everybody(world_size());
  for (int i = 0; i < world_size(); ++i) everybody[i] = i;
  std::map<std::string, Group> groups;
  for (const auto& backend : settings.backends)
    groups[backend] = new_group(everybody, {.backend = backend});
  if (groups.contains("gloo")) {
    groups[kBareGloo] = new_group(everybody, {.backend = "gloo", .check_calls = false});
    groups[kC10dGloo] = make_c10d_gloo();
  }
  return groups;
}

void run(const Settings& settings) {
  const auto device = device_of_rank(settings);
  const c10::OptionalDeviceGuard guard(device);
  require_support(settings, device);
  const auto groups = make_groups(settings);
  Rank0Table table(settings.csv);
  table.add("op,dtype,bytes,ranks,device,backend,us,gbps,vs_gloo,vs_memcpy");
  for (const auto& op : settings.ops) {
    for (const auto& dtype : settings.dtypes) {
      const auto sizes = op == "barrier" ? std::vector<int64_t>{0} : settings.sizes;
      for (const auto bytes : sizes) measure(settings, groups, {op, dtype, bytes, device}, table);
    }
  }
  if (settings.wait_seconds <= 0 || world_size() == 1) return;
  for (const auto& backend : settings.backends)
    measure_waiting(settings, groups.at(backend), backend, device, table);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Collectives of every backend against gloo and a copy in memory; results are checked before "
      "they are timed",
      "tessera bench comm");
  Settings settings;
  bool list = false;
  show_ranks(app);
  app.add_option("--device", settings.device, "of the tensors: cpu, or cuda, waited for after each")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--backends", settings.backends, "shm, gloo, nccl")
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
  if (settings.device == "cuda") {
    if (const auto code = refuse_without_gpu(app)) return *code;
    tool::let_ranks_share_gpus(static_cast<int64_t>(torch::cuda::device_count()));
  }
  return run_question("comm", [&] {
    init();
    run(settings);
    shutdown();
  });
}
