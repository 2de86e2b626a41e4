#include "compiler/lazy/region.h"

#include <tessera/compile/pass.h>

#include "compiler/lazy/fake.h"
#include "compiler/runtime/program.h"
#include "compiler/trace/key.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

namespace tessera::compiler {
namespace {

constexpr int kMostFailures = 8;
constexpr int kRests = 16;  // calls from one trial to the next, after so many failures

std::vector<at::Tensor> tensors_of(const std::vector<RecordedInput>& inputs) {
  std::vector<at::Tensor> tensors;
  for (const auto& input : inputs) tensors.push_back(input.tensor);
  return tensors;
}

/// Puts what a program computed where the code left tensors without memory, and into what it wrote.
class Delivery {
 public:
  Delivery(const std::vector<RecordedInput>& inputs, std::vector<at::Tensor> values)
      : inputs_(inputs), values_(std::move(values)) {
    for (const auto& input : inputs_) taken_.insert(storage_of(input.tensor));
  }

  /// Values come for `alive` first, then for the inputs of these numbers.
  void deliver(const std::vector<LiveMemory>& alive, const std::vector<size_t>& written) {
    const at::NoGradGuard no_grad;
    const RunScope run;
    for (size_t i = 0; i < alive.size(); ++i) values_[i] = owned(values_[i]);
    for (size_t i = 0; i < written.size(); ++i) {
      const auto& target = inputs_[written[i]].tensor;
      const auto& value = values_[alive.size() + i];
      if (!shows_same_memory(value, target)) target.copy_(value);
    }
    for (size_t i = 0; i < alive.size(); ++i) give_contents(alive[i], values_[i]);
  }

 private:
  /// A value that shares no memory with inputs; parts of one memory are fine if they don't overlap.
  at::Tensor owned(const at::Tensor& value) {
    auto* storage = storage_of(value);
    const auto begin = value.storage_offset();
    const auto end = begin + value.numel();
    bool is_free = !taken_.contains(storage) && value.is_non_overlapping_and_dense();
    for (const auto& [from, to] : parts_[storage])
      is_free = is_free && (end <= from || to <= begin);
    if (!is_free) return value.clone();
    parts_[storage].emplace_back(begin, end);
    return value;
  }

  const std::vector<RecordedInput>& inputs_;
  std::vector<at::Tensor> values_;
  std::set<const c10::StorageImpl*> taken_;
  std::map<const c10::StorageImpl*, std::vector<std::pair<int64_t, int64_t>>> parts_;
};

}  // namespace

/// One run of the code.
struct Region::Run {
  Region& region;
  Follower follower;
  Recorder recorder;
  bool is_known = false;  // everything came as on a known path

  explicit Run(Region& owner)
      : region(owner),
        follower(owner.paths(), [this] { catch_up(); }),
        recorder(Inputs::ByStorage, owner.known_.empty() ? nullptr : &follower) {
    follower.watch(recorder.graph());
    if (owner.known_.empty()) leave();
  }

  /// Other ranks get to know that this one has no program to run.
  void leave() { region.agreement_.exchange(0); }

  /// Runs what was put off.
  void catch_up() {
    leave();
    compute();
  }

  void compute() {
    auto graph = recorder.graph();
    const auto alive = recorder.memory().alive();
    add_outputs(graph, alive);
    const auto& inputs = recorder.memory().inputs();
    Delivery(inputs, Program(graph).run(tensors_of(inputs), {})).deliver(alive, written());
  }

  /// Which inputs the code has written.
  std::vector<size_t> written() {
    std::vector<size_t> found;
    for (size_t i = 0; i < recorder.memory().inputs().size(); ++i) {
      if (recorder.memory().written(i)) found.push_back(i);
    }
    return found;
  }

  void add_outputs(Graph& graph, const std::vector<LiveMemory>& alive) {
    for (const auto& memory : alive)
      graph.outputs.push_back({memory.value, OutputKind::Result, kNoValue});
    for (const size_t i : written())
      graph.outputs.push_back(
          {*recorder.memory().written(i), OutputKind::Write, recorder.memory().inputs()[i].value});
    for (size_t i = 0; i < graph.inputs.size(); ++i) {
      const bool is_leaf = recorder.memory().inputs()[i].tensor.requires_grad();
      graph.inputs[i].kind = is_leaf ? InputKind::Parameter : InputKind::Outside;
      graph.inputs[i].name = c10::str(is_leaf ? "parameter " : "tensor ", i);
    }
  }

  /// Whether everything came as on a known path, here and on all ranks; then its program has run.
  bool arrive() {
    if (!follower.is_following() || region.known_.empty()) return false;
    const auto alive = recorder.memory().alive();
    const auto* path = follower.arrived(alive);
    const auto found = std::find_if(
        region.known_.begin(), region.known_.end(),
        [&](const auto& compiled) { return path != nullptr && &compiled->path == path; });
    is_known = found != region.known_.end();
    const auto mine = is_known ? (*found)->executable.messages : 0;
    const auto all = region.agreement_.exchange(mine);
    if (!is_known || !all.is_one()) {
      compute();
      return false;
    }
    const auto& inputs = recorder.memory().inputs();
    Delivery(inputs, (*found)->executable.run(tensors_of(inputs))).deliver(alive, written());
    return true;
  }
};

std::vector<const Path*> Region::paths() const {
  std::vector<const Path*> paths;
  for (const auto& compiled : known_) paths.push_back(&compiled->path);
  return paths;
}

void Region::fall_back(const std::string& why) {
  why_eager_ = why;
  log_.push_back("runs as it is: " + why);
  ++counters()["fallbacks"];
  TORCH_CHECK(!options_.fullgraph, options_.name,
              ": expected something that can be compiled as a whole (fullgraph), but ", why);
  TORCH_WARN(options_.name, " runs as it is, since ", why);
}

void Region::run(c10::function_ref<void()> body) {
  // Inside something else that is being recorded, it is a part of it.
  if (!why_eager_.empty() || capture::observer() != nullptr || rests()) return body();
  Run run(*this);
  try {
    const Recorder::Scope scope(run.recorder);
    body();
  } catch (...) {
    // What ran before the error must have happened.
    if (run.follower.is_following() && !known_.empty()) run.catch_up();
    throw;
  }
  if (run.arrive()) {
    failures_ = 0;
    return;
  }
  run.recorder.settle();
  agreement_.meet(run.recorder.groups());
  if (!run.recorder.scalars().empty())
    run.recorder.give_up("an optimizer steps in it, which compile() of the whole step can run");
  const bool is_broken = !run.recorder.broken().empty();
  const bool is_broken_somewhere = agreement_.exchange(is_broken ? 1 : 0).most > 0;
  if (!is_broken_somewhere) return run.is_known ? void() : learn(run);
  const auto why = is_broken ? run.recorder.broken() : "another rank can't: see its warning";
  log_.push_back("not used: " + why);
  ++failures_;
  if (options_.fullgraph || (failures_ >= kMostFailures && !options_.tries_again)) fall_back(why);
  if (failures_ == kMostFailures && options_.tries_again)
    TORCH_WARN(options_.name, " mostly runs as it is, since ", why);
}

/// Whether it is not worth a trial now: many have failed, but the next may be of another kind.
bool Region::rests() { return failures_ >= kMostFailures && ++rested_ % kRests != 0; }

void Region::learn(Run& run) {
  if (known_.size() >= options_.most_paths)
    return fall_back(c10::str("it was captured ", known_.size(), " times, in as many forms"));
  if (!known_.empty()) ++counters()["recaptures"];
  const auto alive = run.recorder.memory().alive();
  auto compiled = std::make_unique<Compiled>();
  auto& path = compiled->path;
  path.graph = run.recorder.graph();
  path.calls = run.recorder.calls();
  for (const auto& memory : alive) path.alive.push_back(memory.value);
  auto graph = path.graph;
  run.add_outputs(graph, alive);
  log_.push_back(c10::str("captured: ", graph.nodes.size(), " operators, ", graph.inputs.size(),
                          " tensors in, ", graph.outputs.size(), " out"));
  compiled->executable = options_.compiler(std::move(graph));
  known_.push_back(std::move(compiled));
}

std::string Region::explain() const {
  std::string text;
  for (const auto& line : log_) text += line + "\n";
  return text;
}

}  // namespace tessera::compiler
