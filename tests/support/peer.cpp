#include "support/peer.h"

#include "support/temporary_folder.h"

#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/version.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>

#ifndef TESSERA_PYTHON
#define TESSERA_PYTHON TESSERA_SOURCE_DIR "/.venv/bin/python"
#endif

namespace tessera::testing {

namespace {

using std::chrono::steady_clock;

/// Runs the script in a scope of its own between loading `inputs` and saving `outputs`.
constexpr const char* kFrame = R"(
import os, sys
import torch

torch.set_num_threads(1)
torch.manual_seed(1234)
script, inputs_path, outputs_path, store_path = sys.argv[1:5]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def init_process_group(backend="gloo", **options):
    import torch.distributed as dist
    dist.init_process_group(backend, init_method="file://" + store_path, rank=rank, world_size=world_size, **options)

inputs = torch.load(inputs_path, weights_only=True)
scope = {
    "__name__": "__main__", "torch": torch, "rank": rank, "world_size": world_size,
    "init_process_group": init_process_group, "outputs": {},
    "inputs": dict(zip(inputs[0::2], inputs[1::2])),
}
with open(script) as file:
    exec(compile(file.read(), script, "exec"), scope)
# Plain tensors that own just what they show: C++ reads no parameters, subclasses or views.
torch.save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in scope["outputs"].items()}, outputs_path)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    torch.distributed.barrier()  # nobody leaves while another one still reads from it
# Taking groups down that engines still hold aborts the interpreter now and then.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
)";

std::string python() {
  const char* variable = std::getenv("TESSERA_PYTHON");
  if (variable != nullptr) return variable;
  return std::filesystem::exists(TESSERA_PYTHON) ? TESSERA_PYTHON : "python3";
}

void write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("run_peer: cannot write " + path.string());
}

void save_tensors(const std::filesystem::path& path, const Tensors& tensors) {
  // Names and tensors in turn: C++ pickles a dict with a type tag that torch.load(weights_only)
  // refuses.
  std::vector<c10::IValue> items;
  for (const auto& [name, tensor] : tensors) {
    items.emplace_back(name);
    items.emplace_back(tensor.detach());
  }
  const std::vector<char> bytes =
      torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(items)));
  write_file(path, {bytes.data(), bytes.size()});
}

Tensors load_tensors(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file),
                                std::istreambuf_iterator<char>()};
  Tensors result;
  const auto dict = torch::jit::pickle_load(bytes).toGenericDict();
  for (const auto& item : dict) result.emplace(item.key().toStringRef(), item.value().toTensor());
  return result;
}

std::string version_without_build(const std::string& version) {
  return version.substr(0, version.find('+'));
}

std::optional<std::string> find_peer() {
  const ProgramResult result = run_program(
      {.arguments = {python(), "-c",
                     "import importlib.metadata as m; print(m.version('torch'), end='')"}});
  if (!result.status.ok())
    return "no Python with torch at " + python() + " (TESSERA_PYTHON): " + result.output;
  if (version_without_build(result.output) != version_without_build(TORCH_VERSION)) {
    return "torch of " + python() + " is " + result.output + ", this binary was built with " +
           TORCH_VERSION;
  }
  return std::nullopt;
}

SubprocessOptions peer_process(const TemporaryFolder& folder, int rank, int n,
                               const PeerOptions& options) {
  const auto file = [&](const std::string& name) { return (folder.path() / name).string(); };
  const std::string number = std::to_string(rank);
  SubprocessOptions result{.arguments = {python(), file("frame.py"), file("script.py"),
                                         file("inputs"), file("outputs." + number), file("store")},
                           .environment = {{"RANK", number},
                                           {"WORLD_SIZE", std::to_string(n)},
                                           {"LOCAL_RANK", number},
                                           {"OMP_NUM_THREADS", "1"},
                                           {"PYTHONUNBUFFERED", "1"}},
                           .output = folder.path() / ("log." + number)};
  for (const auto& [name, value] : options.environment) result.environment[name] = value;
  return result;
}

PeerResult finish(Subprocess& process, const std::filesystem::path& outputs,
                  steady_clock::time_point deadline) {
  PeerResult result;
  if (!wait_any({&process}, deadline)) {
    result.timed_out = true;
    process.signal(SIGKILL);
  }
  result.status = *process.wait(std::chrono::minutes(1));
  result.output = process.output();
  if (result.ok()) result.tensors = load_tensors(outputs);
  return result;
}

}  // namespace

std::optional<std::string> peer_missing() {
  static const std::optional<std::string> reason = find_peer();
  return reason;
}

std::vector<PeerResult> run_peers(int n, const std::string& script, const Tensors& inputs,
                                  PeerOptions options, std::source_location where) {
  const TemporaryFolder folder;
  write_file(folder.path() / "frame.py", kFrame);
  if (script.find('\n') == std::string::npos && script.ends_with(".py")) {
    std::filesystem::copy_file(script, folder.path() / "script.py");
  } else {
    write_file(folder.path() / "script.py", script);
  }
  save_tensors(folder.path() / "inputs", inputs);
  const auto deadline = steady_clock::now() + options.deadline;
  std::vector<Subprocess> processes;
  for (int rank = 0; rank < n; ++rank)
    processes.emplace_back(peer_process(folder, rank, n, options));
  std::vector<PeerResult> results;
  for (int rank = 0; rank < n; ++rank) {
    results.push_back(
        finish(processes[rank], folder.path() / ("outputs." + std::to_string(rank)), deadline));
    const PeerResult& result = results.back();
    if (result.ok()) continue;
    ADD_FAILURE_AT(where.file_name(), static_cast<int>(where.line()))
        << "Python peer " << rank << " of " << n << ": "
        << (result.timed_out ? "killed at the deadline" : "ended by ")
        << (result.timed_out ? "" : result.status.text()) << "; its output:\n"
        << result.output;
  }
  return results;
}

PeerResult run_peer(const std::string& script, const Tensors& inputs, PeerOptions options,
                    std::source_location where) {
  return std::move(run_peers(1, script, inputs, std::move(options), where).front());
}

}  // namespace tessera::testing
