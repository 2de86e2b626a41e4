#include <tessera/optim.h>

#include "compiler/codegen/emit.h"
#include "compiler/pipeline.h"
#include "compiler/step_impl.h"
#include "replicate/local_part.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

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

/// The numbers that variants of such calls read anew at each, as they are.
std::vector<compiler::VaryingScalar> scalars_now(const std::deque<Variant>& variants,
                                                 const CallShape& shape) {
  std::vector<compiler::VaryingScalar> found;
  for (const auto& variant : variants) {
    if (!variant.is_alike(shape)) continue;  // what they read may be gone
    for (const auto& scalar : variant.recording().scalars) {
      found.push_back(scalar);
      found.back().value = scalar.read();
    }
  }
  return found;
}

/// The name of one that the recorded function itself has set, before or after it was read; empty if
/// there is none.
std::string find_set(const Recording& recording,
                     const std::vector<compiler::VaryingScalar>& before) {
  for (const auto& scalar : recording.scalars) {
    const bool is_set_before = std::any_of(before.begin(), before.end(), [&](const auto& was) {
      return scalar.who == was.who && scalar.name == was.name && scalar.value != was.value;
    });
    if (is_set_before || scalar.read() != scalar.value) return scalar.name;
  }
  return {};
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

std::vector<OptimizerTensor> tensors_of(const torch::optim::Optimizer& optimizer) {
  std::vector<OptimizerTensor> found;
  const auto* ours = dynamic_cast<const optim::Optimizer*>(&optimizer);
  if (ours == nullptr) return found;
  for (const auto& group : ours->param_groups()) {
    for (const auto& parameter : group.params()) {
      for (const auto& [name, tensor] : ours->state_of(parameter))
        found.push_back({tensor, parameter, name});
    }
  }
  return found;
}

compiler::TensorNames Step::Impl::names_for(const StepArguments& given) const {
  compiler::TensorNames names;
  const auto tensors = compiler::local_tensors(given);
  for (size_t i = 0; i < tensors.size(); ++i)
    names.add(tensors[i], InputKind::Argument, c10::str("argument ", i));
  std::map<const c10::TensorImpl*, std::string> names_of;
  auto roots = given.modules;
  if (auto* named = named_module()) roots.push_back(named);
  names.roots.assign(roots.begin(), roots.end());
  for (const auto* root : roots) {
    for (const auto& parameter : root->named_parameters()) {
      names.add(replication::local_part(parameter.value()), InputKind::Parameter, parameter.key());
      names_of.emplace(parameter.value().unsafeGetTensorImpl(), parameter.key());
    }
    for (const auto& buffer : root->named_buffers())
      names.add(buffer.value(), InputKind::Buffer, buffer.key());
  }
  for (const auto* optimizer : optimizers_of(given)) {
    for (const auto& [tensor, parameter, name] : tensors_of(*optimizer)) {
      const auto known = names_of.find(parameter.unsafeGetTensorImpl());
      names.add(replication::local_part(tensor), InputKind::State,
                known == names_of.end() ? name : name + " of " + known->second);
    }
  }
  return names;
}

void Step::Impl::learn(const Recording& recording, const StepArguments& given) {
  const auto holds = [](const std::vector<at::Tensor>& tensors, const at::Tensor& wanted) {
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const auto& tensor) { return tensor.is_same(wanted); });
  };
  for (const auto& owner : recording.gradients) {
    if (holds(parameters, owner.parameter) || holds(given.tensors, owner.parameter)) continue;
    parameters.push_back(owner.parameter);
    for (auto& variant : variants) variant.notice(owner.parameter);
  }
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
  auto graph = variant.captured();
  if (!options.keep_grads) {
    std::erase_if(graph.outputs,
                  [](const auto& output) { return output.kind == OutputKind::Gradient; });
  }
  accept(variant, std::move(graph), {});
}

void Step::Impl::drop_gradients(const Recording& recording) const {
  if (options.keep_grads) return;
  for (const auto& owner : recording.gradients) owner.parameter.mutable_grad().reset();
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
    if (!variant.is_alike(shape)) continue;
    if (match(variant, shape, recording)) return {};
    if (variant.shape().numbers == shape.numbers &&
        gradients_before(variant.recording()) == gradients_before(recording))
      return "it is not the same at each call: " +
             compiler::difference(variant.recording(), recording);
  }
  if (variants.size() < kMostVariants) return {};
  return c10::str("it was captured ", kMostVariants,
                  " times, for as many kinds of calls; the last change was in ", why_again);
}

std::optional<std::vector<compiler::NumberUse>> Step::Impl::match(
    const Variant& variant, const CallShape& shape, const Recording& recording) const {
  auto uses = variant.match(shape, recording);
  return uses && !uses->empty() && !takes_numbers ? std::nullopt : uses;
}

void Step::Impl::check_numbers(const CallShape& shape, const Recording& recording) {
  for (auto& variant : variants) {
    if (!variant.takes_numbers() || !variant.misfit_besides_gradients(shape).empty()) continue;
    if (!recording.broken.empty() || variant.match(shape, recording)) continue;
    variant.fix_numbers();
    takes_numbers = false;
    log.emplace_back("numbers among its arguments steer it: each has a program of its own");
  }
}

void Step::Impl::take(CallShape shape, Recording recording, const StepArguments& given) {
  agreement.meet(recording.groups);
  check_numbers(shape, recording);
  const auto why_not = objection(shape, recording);
  // Note [ranks agree]: what one can't run, none does.
  const auto worst = agreement.exchange(!why_not.empty() ? 2 : !recording.broken.empty() ? 1 : 0);
  if (!why_not.empty()) return fall_back(why_not);
  if (worst.most == 2) return fall_back("another rank can't run it as a program: see its warning");
  if (worst.most == 1) {
    ++kept_tensors;
    log.push_back("not used: " +
                  (recording.broken.empty() ? "that of another rank can't be" : recording.broken));
    return;
  }
  kept_tensors = 0;
  for (auto& variant : variants) {
    const auto uses = match(variant, shape, recording);
    if (!uses) continue;
    variant.learn_bystanders(recording);
    const auto before = gradients_before(variant.recording());
    if (std::find(before.begin(), before.end(), std::nullopt) != before.end())
      variant = Variant(kind, std::move(shape), std::move(recording), given);
    else if (before != gradients_before(recording))
      variant.ignore_gradients();
    const bool learned = variant.vary(*uses);
    for (const size_t number : learned ? compiler::used_numbers(*uses) : std::vector<size_t>())
      log.push_back(c10::str("number ", number, " among its arguments is read at each call"));
    if (learned || !variant.is_ready()) make_ready(variant);
    return;
  }
  note_capture();
  variants.emplace_back(kind, std::move(shape), std::move(recording), given);
}

/// The program for this call; null if there is none, here or on a rank that this one talks to.
compiler::Variant* Step::Impl::find_ready(const CallShape& shape) {
  const auto found = std::find_if(variants.begin(), variants.end(), [&](const auto& variant) {
    return variant.is_ready() && variant.misfit(shape).empty();
  });
  auto* mine = found == variants.end() ? nullptr : &*found;
  if (options.parallel_mode) {
    // All have one or none has: otherwise some would send what nobody expects.
    TORCH_CHECK(
        agreement.exchange(mine == nullptr ? 0 : 1).is_one(),
        "compile: expected calls of one kind on all ranks in a parallel mode, but some have "
        "a program for theirs and others do not; give them batches of one size");
    return mine;
  }
  const auto all = agreement.exchange(mine == nullptr ? 0 : mine->messages());
  if (all.least > 0 && !all.is_one())
    fall_back("ranks made programs of it that send different messages");
  return all.is_one() ? mine : nullptr;
}

Step::Step(CompileOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {
  compiler::check_options(impl_->options);
}

Step::~Step() = default;
Step::Step(Step&&) noexcept = default;

std::vector<at::Tensor> Step::Impl::record(const StepArguments& given, CallShape shape, Run run) {
  auto known = parameters;
  for (const auto* module : modules_of(given)) {
    for (const auto& parameter : module->parameters(/*recurse=*/false)) known.push_back(parameter);
  }
  auto owners = known;
  for (const auto& tensor : given.tensors) {
    if (tensor.defined() && tensor.is_leaf() && tensor.requires_grad()) owners.push_back(tensor);
  }
  const auto numbers = scalars_now(variants, shape);
  const auto own_kind = kind;  // a call of the same function inside of it sets another
  auto recording = compiler::record(run, compiler::local_tensors(given), names_for(given), owners);
  kind = own_kind;
  auto results = std::exchange(recording.results, {});
  if (const auto name = find_set(recording, numbers); !name.empty() && recording.broken.empty())
    recording.broken = "it sets " + name + " itself, which its program would not do; set it before";
  // The program could not tell whether it is given the parameter or uses its own.
  for (size_t i = 0; i < given.tensors.size() && recording.broken.empty(); ++i) {
    const auto is_argument = [&](const auto& tensor) { return tensor.is_same(given.tensors[i]); };
    if (std::any_of(known.begin(), known.end(), is_argument))
      recording.broken = c10::str("argument ", i, " is a parameter of a module that it uses");
    else if (given.tensors[i].defined() && given.tensors[i].grad().defined())
      recording.broken = c10::str("argument ", i, " gets a gradient; give it detached");
  }
  std::erase_if(recording.bystanders, [&](const auto& bystander) {
    return std::ranges::any_of(
        given.tensors, [&](const auto& tensor) { return tensor.is_same(bystander.parameter); });
  });
  learn(recording, given);
  drop_gradients(recording);
  take(std::move(shape), std::move(recording), given);
  return results;
}

std::vector<at::Tensor> Step::call(const StepArguments& given,
                                   c10::function_ref<std::vector<at::Tensor>()> run) {
  auto& self = *impl_;
  self.kind = kNoKind;
  self.require_program();
  // Inside another function that is being recorded, this one is a part of it.
  if (!self.why_eager.empty() || capture::observer() != nullptr) return run();
  const auto modules = self.modules_of(given);
  auto shape = compiler::shape_of(given, modules, self.optimizers_of(given));
  // A parallel mode puts others into their place, and says so by itself.
  if (!self.options.parallel_mode) shape.parameters = compiler::parameters_of(modules);
  if (auto* variant = self.find_ready(shape)) {
    self.last = variant;
    self.kind = variant->kind;
    auto results = variant->run(given);
    self.drop_gradients(variant->recording());
    return results;
  }
  if (!self.why_eager.empty()) return run();
  self.kind = self.kind_of(shape);
  // Now: what it depends on is another thing when the function has run.
  self.why_again = self.variants.empty() ? "" : self.variants.back().misfit(shape);
  if (self.options.parallel_mode) return self.record_parallel(given, std::move(shape), run);
  return self.record(given, std::move(shape), run);
}

size_t Step::last_kind() const { return impl_->kind; }

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
