#include "compiler/programs/step.h"

#include <tessera/optim.h>

#include "checkpoint/run_state.h"
#include "compiler/programs/pipeline.h"
#include "compiler/runtime/listing.h"
#include "compiler/runtime/roofline.h"
#include "replicate/join.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace tessera {

std::map<std::string, int64_t>& counters() {
  thread_local std::map<std::string, int64_t> counters;
  return counters;
}

namespace detail {

using compiler::CallShape;
using compiler::Recording;
using compiler::Variant;

namespace {

void add_modules(torch::nn::Module& root, std::vector<torch::nn::Module*>& found) {
  if (std::find(found.begin(), found.end(), &root) != found.end()) return;
  found.push_back(&root);
  for (const auto& child : root.children()) add_modules(*child, found);
}

std::vector<std::optional<bool>> gradients_before(const Recording& recording) {
  std::vector<std::optional<bool>> found;
  for (const auto& owner : recording.gradients) found.push_back(owner.had_gradient);
  return found;
}

}  // namespace

Step::Impl::Impl(CompileOptions given, std::span<const std::byte> function_object)
    : options(std::move(given)),
      function(function_object),
      variants({"compile", "the function", options.fullgraph}, options.max_programs) {
  TORCH_CHECK_VALUE(options.max_programs > 0,
                    "compile: expected max_programs of at least 1, got 0");
  if (options.module) {
    const auto owned = (**options.module).weak_from_this();  // none: it lies on somebody's stack
    if (!owned.expired()) module_lifetime = owned;
  }
  if (!options.optimizer) return;
  if (const auto* ours = dynamic_cast<const optim::Optimizer*>(&options.optimizer->get()))
    optimizer_lifetime = ours->lifetime();
}

torch::nn::Module* Step::Impl::named_module() const {
  const bool is_gone = module_lifetime && module_lifetime->expired();
  return options.module && !is_gone ? &**options.module : nullptr;
}

torch::optim::Optimizer* Step::Impl::named_optimizer() const {
  const bool is_gone = optimizer_lifetime && optimizer_lifetime->expired();
  return options.optimizer && !is_gone ? &options.optimizer->get() : nullptr;
}

std::vector<torch::nn::Module*> Step::Impl::modules_of(const StepArguments& given) const {
  std::vector<torch::nn::Module*> modules;
  for (auto* module : given.modules) add_modules(*module, modules);
  if (auto* named = named_module()) add_modules(*named, modules);
  return modules;
}

std::vector<torch::optim::Optimizer*> Step::Impl::optimizers_of(const StepArguments& given) const {
  auto optimizers = given.optimizers;
  if (auto* named = named_optimizer()) optimizers.push_back(named);
  return optimizers;
}

void Step::Impl::accept(Variant& variant, Graph graph, const std::vector<Pass>& further,
                        const std::vector<std::string>& without) {
  auto chosen = options;
  chosen.disabled_passes.insert(chosen.disabled_passes.end(), without.begin(), without.end());
  auto prepared = compiler::prepare(std::move(graph), chosen, further);
  auto& reasons = variants.reasons;
  if (!prepared.why_interpreted.empty()) reasons.note("interpreted: " + prepared.why_interpreted);
  reasons.note(c10::str("compiled: ", prepared.graph.nodes.size(), " operators, ",
                        prepared.graph.inputs.size(), " tensors in, ",
                        prepared.graph.outputs.size(), " out"));
  reasons.note(prepared.memory);
  if (!prepared.over_budget.empty()) {
    reasons.note("over the memory_budget: " + prepared.over_budget);
    if (!std::exchange(has_warned_of_memory, true)) TORCH_WARN("compile: ", prepared.over_budget);
  }
  variant.accept(std::move(prepared.graph), std::move(prepared.kernels));
  if (variant.can_leave_work())
    reasons.note("calls with LastTrainStep{false} leave the update of the last bucket to the next");
}

void Step::Impl::make_ready(Variant& variant, const std::vector<std::string>& without) {
  auto graph = variant.recording().graph;
  if (!options.keep_grads) {
    std::erase_if(graph.outputs,
                  [](const auto& output) { return output.kind == OutputKind::Gradient; });
  }
  accept(variant, std::move(graph), {}, without);
  tell_masked(variant);
}

void Step::Impl::tell_masked(const Variant& variant) {
  for (auto& line : variant.recording().guards.masked()) variants.reasons.note(std::move(line));
}

void Step::Impl::drop_gradients(const Recording& recording) const {
  if (options.keep_grads) return;
  for (const auto& owner : recording.gradients) owner.parameter.mutable_grad().reset();
  for (const auto& parameter : recording.empty) parameter.mutable_grad().reset();
}

void Step::Impl::note_capture() {
  if (why_again.empty()) return variants.reasons.note("captured");
  ++counters()["recaptures"];
  variants.reasons.note("captured again, because of a change in " + why_again);
}

/// Why this recording ends all attempts; empty if it doesn't.
std::string Step::Impl::objection(const CallShape& shape, const Recording& recording,
                                  const StepArguments& given) const {
  if (!recording.broken.empty()) {
    // An optimizer's first step makes its state: that recording is no use, the next may be.
    return recording.keeps_tensors && kept_tensors + 1 < kMostKept ? "" : recording.broken;
  }
  for (const auto& variant : variants) {
    if (variant.matches(shape, recording)) return {};
  }
  for (const auto& variant : variants) {
    // See find_outdated.
    if (variant.could_serve() || !variant.guard_failure_besides_gradients(shape).empty()) continue;
    if (gradients_before(variant.recording()) == gradients_before(recording))
      return "it is not the same at each call: " +
             compiler::difference(variant.recording(), recording) +
             cause_of_change(recording, given);
  }
  return {};
}

/// Whether there are as many programs as there may be, and none for this recording.
bool Step::Impl::has_no_place(const CallShape& shape, const Recording& recording) const {
  return recording.broken.empty() && variants.is_full(/*of_shared=*/true) &&
         std::ranges::none_of(
             variants, [&](const Variant& variant) { return variant.matches(shape, recording); });
}

void Step::Impl::warn_of_scalars(const CallShape& shape) {
  constexpr int kMany = 3;
  const auto differs_in_scalars = [&](const Variant& variant) {
    auto other = variant.shape();
    if (other.numbers == shape.numbers || other.numbers.size() != shape.numbers.size())
      return false;
    other.numbers = shape.numbers;
    return difference(other, shape).empty();
  };
  const auto others = std::ranges::count_if(variants, differs_in_scalars);
  if (others + 1 < kMany || std::exchange(has_warned_of_scalars, true)) return;
  variants.reasons.note("captured for each scalar among its arguments: pass it as a 0-dim tensor");
  TORCH_WARN("compile: the function is captured for the third time since a scalar or string among ",
             "its arguments is another one, and each has a program of its own; pass a number that ",
             "changes often as a tensor (0-dim, torch::tensor(number)) to have one program");
}

Variant* Step::Impl::confirm(Variant& variant, CallShape shape, Recording recording,
                             const StepArguments& given) {
  variant.learn_unused(recording);
  const bool has_more_masks = variant.learn_masks(recording.guards);
  const auto before = gradients_before(variant.recording());
  if (std::find(before.begin(), before.end(), std::nullopt) != before.end()) {
    auto form = std::move(variant.form);
    recording.guards = variant.recording().guards;
    variant = Variant(std::move(shape), std::move(recording), given);
    variant.form = std::move(form);
  } else if (before != gradients_before(recording)) {
    variant.ignore_gradients();
  }
  variants.use(variant);
  if (!variant.is_ready()) {
    make_ready(variant);
    return &variant;
  }
  if (has_more_masks) tell_masked(variant);
  return nullptr;
}

void Step::Impl::take(CallShape shape, Recording recording, const StepArguments& given,
                      double seconds) {
  auto& reasons = variants.reasons;
  variants.agreement.meet(recording.groups);
  auto* outdated = find_outdated(shape, recording);
  auto why_not = objection(shape, recording, given);
  if (why_not.empty() && outdated != nullptr && options.fullgraph)
    why_not = "it is not the same as when its program was made: " +
              compiler::difference(outdated->recording(), recording);
  // Note [ranks agree]: what one can't run, none does.
  enum Finding : int64_t { Fine, NoPlace, Outdated, NotUsed, Never };
  const bool needs_place = has_no_place(shape, recording);
  const auto mine = !why_not.empty()            ? Never
                    : !recording.broken.empty() ? NotUsed
                    : outdated != nullptr       ? Outdated
                    : needs_place               ? NoPlace
                                                : Fine;
  constexpr int64_t kUnit = int64_t{1} << 32;
  const auto all = variants.agreement.exchange(mine * kUnit + recheck.interval(seconds)).most;
  const auto worst = all / kUnit;
  if (mine == Never) return reasons.fall_back(why_not);
  if (worst == Never)
    return reasons.fall_back("another rank can't run it as a program: see its warning");
  if (worst == NotUsed) {
    ++kept_tensors;
    reasons.note("not used: " +
                 (recording.broken.empty() ? "that of another rank can't be" : recording.broken));
    return;
  }
  kept_tensors = 0;
  if (worst == NoPlace) note_eviction();
  if (worst == Outdated)
    drop_outdated(outdated, recording);
  else if (recheck.is_due())
    recheck.pass(all % kUnit);
  for (auto& variant : variants) {
    if (!variant.matches(shape, recording)) continue;
    Variant* made = nullptr;
    try {
      made = confirm(variant, std::move(shape), std::move(recording), given);
    } catch (...) {
      agree_on(nullptr);  // the others wait
      throw;
    }
    return agree_on(made);
  }
  note_capture();
  warn_of_scalars(shape);
  agree_on(nullptr);
  variants.add(Variant(std::move(shape), std::move(recording), given));
}

std::vector<at::Tensor> Step::Impl::run(Variant& variant, const StepArguments& given) {
  variants.use(variant);
  const auto begin = std::chrono::steady_clock::now();
  auto results = variant.run(given);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  recheck.note_run(took.count());
  drop_gradients(variant.recording());
  return results;
}

void Step::Impl::finish_work() {
  auto* variant = variants.find([](const Variant& each) { return each.has_left_work(); });
  if (variant == nullptr) return;
  variant->finish_work();
  drop_gradients(variant->recording());
}

/// A training that ended without LastTrainStep{true} ends here, unless an error has ended it.
Step::Impl::~Impl() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    finish_work();
  } catch (const std::exception& error) {
    TORCH_WARN("compile: the last call of a compiled step left an update of parameters to the ",
               "next, which failed at the end: ", error.what(),
               "; pass LastTrainStep{true} to the last call");
  }
}

/// What the program that ran last, of all there are, does not fit.
std::string Step::Impl::why_no_program(const CallShape& shape) const {
  const auto* latest = variants.latest([](const Variant& /*any*/) { return true; });
  return latest == nullptr ? "" : latest->guard_failure(shape);
}

/// The program for this call; null if there is none.
compiler::Variant* Step::Impl::find_ready(const CallShape& shape) {
  if (options.parallel_mode && options.parallel_mode->takes_uneven_batches())
    return find_common(shape);
  auto* ready = variants.find([&](const Variant& variant) {
    return variant.is_ready() && variant.guard_failure(shape).empty();
  });
  // In a parallel mode the function would not be run, but undone.
  const bool records_again = recheck.is_due() && !options.parallel_mode;
  if (ready != nullptr && records_again) {
    ready->release_memory();  // the function needs as much
    ready = nullptr;
  }
  if (announces) variants.agreement.announce(ready == nullptr ? 0 : ready->announced());
  return ready;
}

Step::Step(CompileOptions options, std::span<const std::byte> function)
    : impl_(std::make_unique<Impl>(std::move(options), function)) {
  compiler::check_options(impl_->options);
}

Step::~Step() = default;
Step::Step(Step&&) noexcept = default;

std::vector<at::Tensor> Step::call(const StepArguments& given,
                                   c10::function_ref<std::vector<at::Tensor>()> run,
                                   std::shared_ptr<const void>& form) {
  auto& self = *impl_;
  std::unique_lock alone(self.mutex);
  self.finish_work();
  const auto run_eagerly = [&] {
    alone.unlock();
    return run();
  };
  // Inside another function that is being recorded, this one is a part of it.
  if (capture::observer() != nullptr) return run_eagerly();
  self.variants.reasons.require_program();
  // A part that is computed again draws the same numbers, whether or not there is a program then.
  if (detail::checkpoint::RepeatedScope::is_open() && self.draws_in_kernels()) {
    self.variants.reasons.note_once("runs eagerly inside checkpointed parts, which draw again");
    return run_eagerly();
  }
  if (!self.variants.reasons.why_eager().empty()) return run_eagerly();
  // A rank that has run out of batches would not tell whether it has a program.
  if (detail::replicate::is_joining() && !self.options.parallel_mode) {
    TORCH_CHECK(!self.options.fullgraph, "compile: expected no Join around a function that is to ",
                "be compiled as a whole (fullgraph); there it runs eagerly");
    return run_eagerly();
  }
  const auto modules = self.modules_of(given);
  auto shape = compiler::shape_of(given, modules, self.optimizers_of(given));
  // A parallel mode puts others into their place, and says so by itself.
  if (!self.options.parallel_mode) shape.parameters = compiler::parameters_of(modules);
  if (auto* variant = self.find_ready(shape)) {
    form = variant->form;
    return self.placed(*variant, self.run(*variant, given));
  }
  if (!self.variants.reasons.why_eager().empty()) return run_eagerly();
  if (self.resting > 0) {
    --self.resting;
    return run_eagerly();
  }
  // Now: what it depends on is another thing when the function has run.
  self.why_again = self.why_no_program(shape);
  auto roots = given.modules;
  if (auto* named = self.named_module()) roots.push_back(named);
  const compiler::OverrideScope overrides(self.options.module_override, roots);
  auto results = self.options.parallel_mode ? self.record_parallel(given, std::move(shape), run)
                                            : self.record(given, std::move(shape), run);
  for (auto& variant : self.variants) {
    if (!variant.form) variant.form = form;
  }
  if (self.variants.drop_oldest(/*of_shared=*/true) > 0 && self.options.parallel_mode)
    self.note_eviction();
  return results;
}

std::string Step::explain(const ExplainOptions& options) const {
  auto text = impl_->variants.reasons.text();
  for (const auto& variant : impl_->variants) {
    if (const auto why = variant.why_not_replayed(); !why.empty())
      text += "not replayed as a CUDA graph: " + why + "\n";
  }
  const auto* last = impl_->variants.latest(&Variant::is_ready);
  if (options.time_kernels && last != nullptr)
    text += compiler::roofline_text(compiler::time_kernels(last->graph(), last->kernels()));
  return text;
}

std::string Step::generated_code() const {
  const auto* last = graph();
  return last == nullptr ? "" : compiler::program_text(*last);
}

std::string Step::program_graph() const {
  const auto* last = graph();
  return last == nullptr ? "" : last->str();
}

const Graph* Step::graph() const {
  const auto* last = impl_->variants.latest(&Variant::is_ready);
  return last == nullptr ? nullptr : &last->graph();
}

}  // namespace detail
}  // namespace tessera
