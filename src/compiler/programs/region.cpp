#include "compiler/programs/region.h"

#include <tessera/comm.h>
#include <tessera/compile/pass.h>

#include "base/devices.h"
#include "comm/call_check.h"
#include "compiler/ir/operators.h"
#include "compiler/record/dispatch_key.h"
#include "compiler/record/recorder.h"
#include "compiler/record/trace.h"
#include "compiler/runtime/program.h"
#include "replicate/join.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace tessera::compiler {
namespace {

constexpr const char* kRests = "it rests, since many trials failed";

bool has_other_ranks() { return is_initialized() && world_size() > 1; }

/// Read on the caller's stream, on which they may not have been made.
std::vector<at::Tensor> tensors_of(const std::vector<RecordedInput>& inputs) {
  std::vector<at::Tensor> tensors;
  for (const auto& [value, tensor, is_constant, content] : inputs) {
    if (tensor.is_cuda()) tensor.record_stream(current_stream(tensor.device()));
    tensors.push_back(tensor);
  }
  return tensors;
}

/// Puts what a program computed where the code left tensors without memory.
class Delivery {
 public:
  Delivery(const std::vector<RecordedInput>& inputs, std::vector<at::Tensor> values)
      : inputs_(inputs), values_(std::move(values)) {
    for (const auto& input : inputs_) taken_.insert(storage_of(input.tensor));
  }

  /// Values come for `alive` first; inputs that are written have been.
  void deliver(const std::vector<LiveMemory>& alive) {
    const at::NoGradGuard no_grad;
    const RunScope run;
    for (size_t i = 0; i < alive.size(); ++i) values_[i] = owned(values_[i]);
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

/// One run of the code. Code that sends no messages is a rank's own affair, and others may not run
/// it; of other code ranks agree when it is learned, see Note [ranks agree].
struct Region::Run {
  Region& region;
  TraceMatcher matcher;
  Recorder recorder;
  bool rests;                  // nothing is learned; what is known is matched, as other ranks do
  bool communicates = false;   // other ranks run it, too
  bool has_announced = false;  // that there is a program, or none; see Agreement

  Run(Region& owner, bool is_resting)
      : region(owner),
        matcher(owner.traces(), [this] { catch_up(); }),
        recorder(Inputs::ByStorage, owner.known_.empty() ? nullptr : &matcher),
        rests(is_resting) {
    matcher.watch(recorder.graph());
    recorder.before_sending([this] { note_sending(); });
    recorder.before_hidden([this] { note_hidden(); });
    recorder.at_cuts([this] { region.cut(*this); });
    if (rests && owner.known_.empty()) recorder.break_off(kRests);
  }

  /// What follows is another program's.
  void restart() {
    matcher = TraceMatcher(region.traces(), [this] { catch_up(); });
    matcher.watch(recorder.graph());
    recorder.restart(region.known_.empty() ? nullptr : &matcher);
    communicates = has_announced = false;
  }

  /// A message comes for which the host waits, while those of the recording may be put off: on all
  /// ranks, or on none.
  void note_hidden() {
    communicates = true;
    if (has_announced) return;
    const bool is_matching = matcher.is_matching() && !region.known_.empty();
    has_announced = !is_matching;
    region.known_.agreement.announce(is_matching ? 1 : 0, /*now=*/true);
  }

  /// It goes on without a program.
  void note_sending() {
    communicates = true;
    if (!std::exchange(has_announced, true)) region.known_.agreement.announce(0);
  }

  bool sends() { return std::ranges::any_of(recorder.graph().nodes, is_launch); }

  /// Runs what was put off.
  void catch_up() {
    if (sends()) note_sending();
    if (!recorder.graph().nodes.empty()) compute();
    if (rests) recorder.break_off(kRests);
  }

  void compute() {
    auto graph = recorder.graph();
    const auto alive = recorder.memory().alive();
    add_outputs(graph, alive);
    const auto& inputs = recorder.memory().inputs();
    Delivery(inputs, Program(graph).run(tensors_of(inputs))).deliver(alive);
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

  /// Whether everything came as in a known trace; then its program has run.
  bool arrive() {
    if (!matcher.is_matching() || region.known_.empty()) return false;
    const auto alive = recorder.memory().alive();
    const auto* trace = matcher.completed(alive);
    auto* found = region.known_.find([&](const Compiled& each) { return &each.trace == trace; });
    communicates = communicates || sends();
    if (found == nullptr) {
      if (sends()) note_sending();
      compute();
      return false;
    }
    region.known_.use(*found);
    const auto& inputs = recorder.memory().inputs();
    const auto program = found->executable.messages;
    if (sends() && !std::exchange(has_announced, true)) region.known_.agreement.announce(program);
    const comm::ProgramScope scope(static_cast<uint64_t>(program));
    Delivery(inputs, found->executable.run(tensors_of(inputs))).deliver(alive);
    return true;
  }

  Trace trace() {
    Trace trace{recorder.graph(), recorder.calls(), {}};
    for (const auto& memory : recorder.memory().alive()) trace.alive.push_back(memory.value);
    return trace;
  }

  /// Another rank's run may have been new, so that this one was not put off to its end.
  bool is_known() {
    const auto mine = trace();
    return std::ranges::any_of(region.known_,
                               [&](const auto& each) { return each.trace.is_same(mine); });
  }

  /// Of all ranks, if they run it.
  struct Verdict {
    std::string why;        // it can't be a program; empty if it can
    bool is_known = false;  // to this rank
    bool is_full = false;   // another program has to go for it
  };
  Verdict judge() {
    enum Finding : int64_t { Fine, Full, Rests, Broken };
    Verdict verdict{recorder.broken()};
    auto& why = verdict.why;
    if (why.empty() && !recorder.hyperparameters().empty())
      why = "an optimizer steps in it, which compile() of the whole step can run";
    if (why.empty()) verdict.is_known = is_known();
    const bool needs_place = !verdict.is_known && region.known_.is_full(communicates);
    const Finding mine = !why.empty() ? why == kRests ? Rests : Broken : needs_place ? Full : Fine;
    const auto worst = communicates ? region.known_.agreement.exchange(mine).most : mine;
    if (worst == Rests) why = kRests;
    if (mine < Broken && worst == Broken) why = "another rank can't: see its warning";
    verdict.is_full = worst == Full;
    return verdict;
  }
};

std::vector<const Trace*> Region::traces() const {
  std::vector<const Trace*> traces;
  for (const auto& compiled : known_) traces.push_back(&compiled.trace);
  return traces;
}

void Region::run(c10::function_ref<void()> body) {
  // Inside something else that is being recorded, it is a part of it.
  if (capture::observer() != nullptr || detail::replicate::is_joining()) return body();
  std::unique_lock alone(mutex_);
  if (!known_.reasons.why_eager().empty() || failures_.rest()) {
    alone.unlock();
    return body();
  }
  Run run(*this, own_failures_.rest());
  try {
    const Recorder::Scope scope(run.recorder);
    body();
  } catch (...) {
    // What ran before the error must have happened.
    if (run.matcher.is_matching() && !known_.empty()) run.catch_up();
    throw;
  }
  finish(run);
}

/// Somebody needs values in the middle of the code. Programs of its parts are found by what comes,
/// as those of the whole are.
void Region::cut(Run& run) {
  const capture::Hidden hidden;
  const bool rests = run.recorder.broken() == kRests;
  finish(run);
  run.restart();
  const auto& why_eager = known_.reasons.why_eager();
  if (rests || !why_eager.empty()) run.recorder.break_off(rests ? kRests : why_eager);
}

/// The code has come to an end, or to a cut.
void Region::finish(Run& run) {
  if (run.recorder.calls().empty() && run.recorder.broken().empty() && !run.communicates) return;
  run.recorder.check_generator();
  const bool arrived = run.arrive();
  auto& failures = run.communicates || !has_other_ranks() ? failures_ : own_failures_;
  if (arrived) return failures.forget();
  run.recorder.settle();
  known_.agreement.meet(run.recorder.groups());
  auto [why, is_known, is_full] = run.judge();
  if (why.empty() && run.communicates)
    why = learn_together(run, is_known);
  else if (why.empty() && !is_known)
    learn(run);
  known_.drop_oldest(run.communicates);
  if (why == kRests || (why.empty() && !is_full)) return;
  // Code that takes more and more forms is not worth a program each time.
  const bool is_lasting = !why.empty();
  if (!is_lasting)
    why = c10::str("it takes more forms than programs are kept (", options_.max_programs, ")");
  known_.reasons.note_once("not used: " + why);
  ++failures.in_a_row;
  if (is_lasting && options_.fullgraph) return known_.reasons.fall_back(why);
  if (failures.in_a_row != Failures::kMost) return;
  if (is_lasting && &failures == &failures_ && !options_.tries_again)
    return known_.reasons.fall_back(why);
  TORCH_WARN(options_.caller, ": ", options_.subject, " mostly runs eagerly, since ", why);
}

/// Whether it is not worth a trial now: many have failed, but the next may be of another kind.
bool Region::Failures::rest() {
  constexpr int kCalls = 16;  // from one trial to the next
  return in_a_row >= kMost && ++rested % kCalls != 0;
}

Region::Compiled& Region::learn(Run& run) {
  if (!known_.empty()) ++counters()["recaptures"];
  Compiled compiled;
  compiled.trace = run.trace();
  compiled.communicates = run.communicates;
  auto graph = compiled.trace.graph;
  run.add_outputs(graph, run.recorder.memory().alive());
  known_.reasons.note(c10::str("captured: ", graph.nodes.size(), " operators, ",
                               graph.inputs.size(), " tensors in, ", graph.outputs.size(), " out"));
  compiled.executable = options_.compiler(std::move(graph));
  return known_.add(std::move(compiled));
}

/// Why the program that was made of this run is not used; empty if it is.
std::string Region::learn_together(Run& run, bool is_known) {
  using Agreed = decltype(known_)::Agreed;
  Compiled* made = nullptr;
  try {
    if (!is_known) made = &learn(run);
  } catch (...) {
    known_.agree_on(0);  // the others wait
    throw;
  }
  const auto agreed = known_.agree_on(made == nullptr ? 0 : made->executable.messages);
  if (agreed == Agreed::Yes) return {};
  if (made != nullptr) known_.drop_if([&](const Compiled& each) { return &each == made; });
  return agreed == Agreed::DifferentMessages ? kDifferentMessages
                                             : "another rank knows it already, or in another form";
}

}  // namespace tessera::compiler
