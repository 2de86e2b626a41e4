// What does being hookable cost? Calls of torch::nn's modules against tessera::nn's, which may have
// hooks. In the table: nanoseconds per call; with hooks, `plain_ns` is still torch::nn's.
#include <tessera/nn.h>

#include "numbers.h"
#include "statistics.h"
#include "table.h"

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>

namespace {

using namespace tessera;
using namespace tessera::benchmarks;
using Clock = std::chrono::steady_clock;

struct Settings {
  int repeats = 31;
  double milliseconds = 20;
  std::string csv;
};

/// Does nothing, out of the compiler's sight: what remains is the call itself.
struct NothingImpl : torch::nn::Module {
  __attribute__((noinline)) at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE_IMPL(PlainNothing, NothingImpl);
TESSERA_MODULE(Nothing);
struct ByValueImpl : torch::nn::Module {
  __attribute__((noinline)) at::Tensor forward(at::Tensor x, at::Tensor) { return x; }
};
TORCH_MODULE_IMPL(PlainByValue, ByValueImpl);
TESSERA_MODULE(ByValue);

/// A loop of calls in one piece, so that the loop's own cost is as small as a user's.
using Loop = std::function<void(int64_t count)>;
template <class M, class... X>
Loop loop_of(M module, const X&... x) {
  return [module, x...](int64_t count) mutable {
    for (int64_t i = 0; i < count; ++i) module->forward(x...);
  };
}

struct Row {
  std::string name;
  Loop plain, tessera;
  std::function<bool()> is_right;
};

template <class Plain, class Ours, class... X>
Row row_of(const std::string& name, Plain plain, Ours ours, const X&... x) {
  const auto is_right = [plain, ours, x...]() mutable {
    return at::equal(plain->forward(x...), ours->forward(x...));
  };
  return {name, loop_of(plain, x...), loop_of(ours, x...), is_right};
}

template <class M, class Make>
M seeded(const Make& make) {
  torch::manual_seed(1);
  return make();
}

std::vector<Row> make_rows() {
  const auto x = torch::randn({1, 8});
  const auto linear = [] { return nn::Linear(8, 8); };
  const auto plain_linear = seeded<torch::nn::Linear>([] { return torch::nn::Linear(8, 8); });
  auto pre_hooked = seeded<nn::Linear>(linear);
  register_forward_pre_hook(pre_hooked, [](torch::nn::Module&, nn::Arguments&) {});
  auto hooked = seeded<nn::Linear>(linear);
  register_forward_hook(hooked, [](torch::nn::Module&, nn::Arguments&, nn::Result&) {});
  Nothing hooked_nothing;
  register_forward_hook(hooked_nothing, [](torch::nn::Module&, nn::Arguments&, nn::Result&) {});
  const auto plain_three = seeded<torch::nn::Sequential>([] {
    return torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::ReLU(),
                                 torch::nn::Linear(8, 8));
  });
  const auto three = seeded<nn::Sequential>(
      [] { return nn::Sequential(nn::Linear(8, 8), nn::ReLU(), nn::Linear(8, 8)); });
  return {
      row_of("do nothing, no hooks", PlainNothing(), Nothing(), x),
      row_of("do nothing with two values, no hooks", PlainByValue(), ByValue(), x, x),
      row_of("do nothing, one hook", PlainNothing(), hooked_nothing, x),
      row_of("linear, no hooks", plain_linear, seeded<nn::Linear>(linear), x),
      row_of("linear, one pre-hook", plain_linear, pre_hooked, x),
      row_of("linear, one hook", plain_linear, hooked, x),
      row_of("sequential of 3, no hooks", plain_three, three, x),
  };
}

double nanoseconds(const Loop& loop, int64_t count) {
  const auto start = Clock::now();
  loop(count);
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() /
         static_cast<double>(count);
}

/// Both sides in turn, so that a busy moment of the machine hits both. The difference is taken pair
/// by pair: it is small against the drift of either side.
std::string measure(const Row& row, const Settings& settings) {
  TORCH_CHECK(row.is_right(), "bench hooks: expected '", row.name,
              "' to compute what torch::nn does");
  const double once = nanoseconds(row.plain, 1000);
  const auto count = std::max<int64_t>(1, static_cast<int64_t>(settings.milliseconds * 1e6 / once));
  nanoseconds(row.tessera, count);
  std::vector<double> plain, extra;
  for (int i = 0; i < settings.repeats; ++i) {
    plain.push_back(nanoseconds(row.plain, count));
    extra.push_back(nanoseconds(row.tessera, count) - plain.back());
  }
  char text[128];
  std::snprintf(text, sizeof(text), "%s,%.1f,%.1f", row.name.c_str(), median(plain),
                median(plain) + median(extra));
  return text;
}

void run(const Settings& settings, bool list) {
  const c10::InferenceMode inference;  // the call counts, not autograd
  const auto rows = make_rows();
  if (list) {
    for (const auto& row : rows) std::cout << row.name << '\n';
    return;
  }
  Table table("hooks", settings.csv);
  table.add("row,plain_ns,tessera_ns");
  for (const auto& row : rows) table.add(measure(row, settings));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Calls of hookable modules against torch::nn's; needs one rank",
               "tessera bench hooks");
  Settings settings;
  bool list = false;
  tool::add_number(app, "--repeats", settings.repeats, 1, 1'000'000,
                   "timed pairs; the median counts");
  tool::add_number(app, "--milliseconds", settings.milliseconds, 1e-3, 1e6, "of each timed loop");
  app.add_option("--csv", settings.csv, "also write the table to this file");
  app.add_flag("--list", list, "print the rows and stop");
  if (const auto code = parse_words(app, argc, argv)) return *code;
  // Started as several ranks, as `tessera bench` does by default: the others would disturb.
  if (is_other_rank()) return 0;
  return run_question("hooks", [&] { run(settings, list); });
}
