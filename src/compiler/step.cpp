#include <tessera/optim.h>

#include "compiler/codegen/emit.h"
#include "compiler/pipeline.h"
#include "compiler/step_impl.h"
#include "replicate/roll_call.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
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

Step::Impl::Impl(CompileOptions given) : options(std::move(given)) {
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

void Step::Impl::fall_back(const std::string& why) {
  why_eager = why;
  log.push_back("runs as it is: " + why);
  ++counters()["fallbacks"];
  require_program();
  TORCH_WARN("compile: the function runs as it is, since ", why);
}

void Step::Impl::require_program() const {
  TORCH_CHECK(!options.fullgraph || why_eager.empty(), "compile: expected a function that can be ",
              "compiled as a whole (fullgraph), but ", why_eager);
}

void Step::Impl::accept(Variant& variant, Graph graph, const std::vector<Pass>& further) {
  auto prepared = compiler::prepare(std::move(graph), options, further);
  if (!prepared.why_interpreted.empty()) log.push_back("interpreted: " + prepared.why_interpreted);
  log.push_back(c10::str("compiled: ", prepared.graph.nodes.size(), " operators, ",
                         prepared.graph.inputs.size(), " tensors in, ",
                         prepared.graph.outputs.size(), " out"));
  variant.accept(std::move(prepared.graph), std::move(prepared.compiled));
}

void Step::Impl::make_ready(Variant& variant) {
  auto graph = variant.recording().graph;
  if (!options.keep_grads) {
    std::erase_if(graph.outputs,
                  [](const auto& output) { return output.kind == OutputKind::Gradient; });
  }
  accept(variant, std::move(graph), {});
}

void Step::Impl::drop_gradients(const Recording& recording) const {
  if (options.keep_grads) return;
  for (const auto& owner : recording.gradients) owner.parameter.mutable_grad().reset();
  for (const auto& parameter : recording.empty) parameter.mutable_grad().reset();
}

void Step::Impl::note_capture() {
  if (variants.empty()) return log.emplace_back("captured"), void();
  ++counters()["recaptures"];
  log.push_back("captured again, because of a change in " + why_again);
}

size_t Step::Impl::kind_of(const CallShape& shape) {
  const auto known = std::find(kinds.begin(), kinds.end(), shape) - kinds.begin();
  if (known == std::ssize(kinds)) kinds.push_back(shape);
  return static_cast<size_t>(known);
}

/// Why this recording ends all attempts; empty if it doesn't.
std::string Step::Impl::objection(const CallShape& shape, const Recording& recording) const {
  if (!recording.broken.empty()) {
    // An optimizer's first step makes its state: that recording is no use, the next may be.
    return recording.keeps_tensors && kept_tensors + 1 < kMostKept ? "" : recording.broken;
  }
  for (const auto& variant : variants) {
    if (!variant.misfit_besides_gradients(shape).empty()) continue;
    if (variant.matches(shape, recording)) return {};
    if (gradients_before(variant.recording()) == gradients_before(recording))
      return "it is not the same at each call: " +
             compiler::difference(variant.recording(), recording);
  }
  return {};
}

/// Whether there are as many programs as there may be, and none for this recording.
bool Step::Impl::has_no_place(const CallShape& shape, const Recording& recording) const {
  return recording.broken.empty() && variants.size() >= kMostVariants &&
         std::ranges::none_of(
             variants, [&](const Variant& variant) { return variant.matches(shape, recording); });
}

/// Calls of kinds that have programs run them, all others run as they are.
void Step::Impl::fill_up() {
  const auto why =
      c10::str("it was captured ", kMostVariants,
               " times, for as many kinds of calls; the last change was in ", why_again);
  if (options.fullgraph) return fall_back(why);
  is_full = true;
  log.push_back("runs as it is, but for calls that have programs: " + why);
  ++counters()["fallbacks"];
  TORCH_WARN("compile: calls of other kinds than before run as they are, since ", why);
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
  log.emplace_back("captured for each scalar among its arguments: pass it as a 0-dim tensor");
  TORCH_WARN("compile: the function is captured for the third time since a scalar or string among ",
             "its arguments is another one, and each has a program of its own; pass a number that ",
             "changes often as a tensor (0-dim, torch::tensor(number)) to have one program");
}

void Step::Impl::take(CallShape shape, Recording recording, const StepArguments& given) {
  agreement.meet(recording.groups);
  const auto why_not = objection(shape, recording);
  // Note [ranks agree]: what one can't run, none does.
  enum Finding : int64_t { Fine, NotUsed, Full, Never };
  const auto mine = !why_not.empty()                 ? Never
                    : has_no_place(shape, recording) ? Full
                    : !recording.broken.empty()      ? NotUsed
                                                     : Fine;
  const auto worst = agreement.exchange(mine).most;
  if (mine == Never) return fall_back(why_not);
  if (worst == Never) return fall_back("another rank can't run it as a program: see its warning");
  if (worst == Full) return fill_up();
  if (worst == NotUsed) {
    ++kept_tensors;
    log.push_back("not used: " +
                  (recording.broken.empty() ? "that of another rank can't be" : recording.broken));
    return;
  }
  kept_tensors = 0;
  for (auto& variant : variants) {
    if (!variant.matches(shape, recording)) continue;
    variant.learn_bystanders(recording);
    const auto before = gradients_before(variant.recording());
    if (std::find(before.begin(), before.end(), std::nullopt) != before.end())
      variant = Variant(kind, std::move(shape), std::move(recording), given);
    else if (before != gradients_before(recording))
      variant.ignore_gradients();
    auto* made = variant.is_ready() ? nullptr : &variant;
    if (made != nullptr) make_ready(*made);
    return agree_on(made);
  }
  note_capture();
  warn_of_scalars(shape);
  agree_on(nullptr);
  variants.emplace_back(kind, std::move(shape), std::move(recording), given);
}

/// The program for this call; null if there is none.
compiler::Variant* Step::Impl::find_ready(const CallShape& shape) {
  const auto found = std::find_if(variants.begin(), variants.end(), [&](const auto& variant) {
    return variant.is_ready() && variant.misfit(shape).empty();
  });
  return found == variants.end() ? nullptr : &*found;
}

/// Note [ranks agree]: a program runs if all ranks made theirs of this call, with the same
/// messages.
void Step::Impl::agree_on(Variant* made) {
  const auto all = agreement.exchange(made == nullptr ? 0 : made->messages());
  if (all.is_one()) return;
  if (made != nullptr) made->withdraw();
  if (all.least > 0) fall_back("ranks made programs of it that send different messages");
}

Step::Step(CompileOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  compiler::check_options(impl_->options);
}

Step::~Step() = default;
Step::Step(Step&&) noexcept = default;

Step::Outcome Step::call(const StepArguments& given,
                         c10::function_ref<std::vector<at::Tensor>()> run) {
  auto& self = *impl_;
  // Inside another function that is being recorded, this one is a part of it.
  if (capture::observer() != nullptr) return {run(), kNoKind};
  std::unique_lock alone(self.mutex);
  const auto run_as_it_is = [&]() -> Outcome {
    alone.unlock();
    return {run(), kNoKind};
  };
  self.kind = kNoKind;
  self.require_program();
  if (!self.why_eager.empty()) return run_as_it_is();
  // A rank that has run out of batches would not tell whether it has a program.
  if (replication::is_joining() && !self.options.parallel_mode) {
    TORCH_CHECK(!self.options.fullgraph, "compile: expected no Join around a function that is to ",
                "be compiled as a whole (fullgraph); there it runs as it is");
    return run_as_it_is();
  }
  const auto modules = self.modules_of(given);
  auto shape = compiler::shape_of(given, modules, self.optimizers_of(given));
  // A parallel mode puts others into their place, and says so by itself.
  if (!self.options.parallel_mode) shape.parameters = compiler::parameters_of(modules);
  auto* variant = self.find_ready(shape);
  if (self.has_programs()) self.agreement.announce(variant == nullptr ? 0 : variant->messages());
  if (variant != nullptr) {
    self.last = variant;
    self.kind = variant->kind;
    auto results = variant->run(given);
    self.drop_gradients(variant->recording());
    return {std::move(results), self.kind};
  }
  if (!self.why_eager.empty() || self.is_full) return run_as_it_is();
  self.kind = self.kind_of(shape);
  // Now: what it depends on is another thing when the function has run.
  self.why_again = self.variants.empty() ? "" : self.variants.back().misfit(shape);
  auto results = self.options.parallel_mode ? self.record_parallel(given, std::move(shape), run)
                                            : self.record(given, std::move(shape), run);
  return {std::move(results), self.kind};
}

std::string Step::explain() const {
  std::string text;
  for (const auto& line : impl_->log) text += line + "\n";
  return text;
}

std::string Step::generated_code() const {
  const auto* last = graph();
  return last == nullptr ? "" : compiler::emit(*last);
}

const Graph* Step::graph() const {
  const auto& variants = impl_->variants;
  if (impl_->last != nullptr) return &impl_->last->graph();
  const auto ready = std::find_if(variants.begin(), variants.end(),
                                  [](const auto& variant) { return variant.is_ready(); });
  return ready == variants.end() ? nullptr : &ready->graph();
}

}  // namespace detail
}  // namespace tessera
