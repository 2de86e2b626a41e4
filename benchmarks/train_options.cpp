#include "train_options.h"

#include "jobs.h"
#include "numbers.h"
#include "train_modes.h"
#include "train_peers.h"

#include <algorithm>

namespace tessera::benchmarks {
namespace {

std::string line_of(const std::string& title, const std::vector<std::string>& names) {
  return title + ": " + CLI::detail::join(names, ",") + "\n";
}

constexpr int kPairsOnCuda = 7;

/// Fills in what was left out, and throws for names that the device does not have.
void complete_train_options(TrainOptions& options) {
  const auto device = options.device_type();
  const auto complete = [&](const char* flag, std::vector<std::string>& chosen,
                            const std::vector<std::string>& known,
                            const std::vector<std::string>& by_default) {
    if (chosen.empty()) chosen = by_default;
    for (const auto& name : chosen) {
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      throw CLI::ValidationError(flag, name + " not in {" + CLI::detail::join(known, ",") + "}");
    }
  };
  auto plain_modes = mode_names(device);
  std::erase_if(plain_modes, is_compiled);  // which have peers of their own
  std::erase_if(plain_modes, is_fp8);
  if (device == c10::DeviceType::CPU) std::erase(plain_modes, "eager");
  if (options.kernels) {
    if (device == c10::DeviceType::CPU)
      throw CLI::ValidationError("--kernels", "expected --device cuda: a CPU has none");
    if (options.modes.empty()) options.modes = {"eager"};
    if (options.peers.empty()) options.peers = {"pytorch"};
  }
  complete("--jobs", options.jobs, job_names(device), job_names(device));
  complete("--modes", options.modes, mode_names(device), plain_modes);
  const std::vector<std::string> peers =
      device == c10::DeviceType::CPU
          ? std::vector<std::string>{"pytorch", "pytorch_malloc"}
          : std::vector<std::string>{"pytorch", "pytorch_compile", "pytorch_graph_compile"};
  complete("--peer", options.peers, peer_names(device), peers);
}

}  // namespace

c10::DeviceType TrainOptions::device_type() const {
  return device == "cuda" ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

void add_train_options(CLI::App& app, TrainOptions& options) {
  app.add_option("--device", options.device, "where: cpu in fp32, cuda in bf16 by autocast")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--jobs", options.jobs, "what is trained; default: all of --list")->delimiter(',');
  app.add_option("--modes", options.modes,
                 "how the ranks train it together; default: all that are not compiled")
      ->delimiter(',');
  app.add_option("--peer", options.peers,
                 "whom to compare with, with attention as it is by default there, while Tessera's "
                 "side asks cuDNN's first on a GPU: pytorch is DistributedDataParallel in Python, "
                 "pytorch_malloc the same with glibc told to keep freed memory, pytorch_compile "
                 "with torch.compile, jax the whole step as one jitted function (modes eager and "
                 "compile, on "
                 "a CPU), pytorch_graph the whole step as one CUDA graph (mode "
                 "eager alone), pytorch_graph_compile both, reducer_* its engine in C++")
      ->delimiter(',');
  const auto* pairs = tool::add_number(
      app, "--pairs", options.pairs, 1, 1'000'000,
      "timed blocks of each side per row; the median counts; on a GPU 7 unless given");
  tool::add_number(app, "--steps", options.steps, 0, 1'000'000,
                   "steps per block; 0: as the job needs");
  app.add_option("--csv", options.csv,
                 "also write the table to this file; beside it: bounds and the machine");
  app.add_flag(
      "--kernels", options.kernels,
      "instead of times, list what a GPU does in one step of both sides, kernel by kernel; "
      "also into benchmarks/results");
  app.final_callback([&options, pairs] {
    if (options.device == "cuda" && pairs->count() == 0) options.pairs = kPairsOnCuda;
    complete_train_options(options);
  });
  app.add_flag("--list", options.list, "print jobs, modes and peers of both devices, and stop");
}

std::string list_choices() {
  std::string text;
  for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
    text += "--device " + c10::DeviceTypeName(device, /*lower_case=*/true) + "\n" +
            line_of("  jobs", job_names(device)) + line_of("  modes", mode_names(device)) +
            line_of("  peers", peer_names(device));
  }
  return text;
}

}  // namespace tessera::benchmarks
