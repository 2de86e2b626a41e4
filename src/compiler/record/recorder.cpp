#include "compiler/record/recorder.h"

#include <tessera/compile/config.h>

#include "base/dispatcher.h"
#include "comm/backend_interfaces.h"
#include "compiler/ir/operators.h"
#include "compiler/record/dispatch_key.h"
#include "compiler/record/recorder_call.h"
#include "nn/module_hooks.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/enum_tag.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <utility>

namespace tessera::compiler {
namespace {

// As capture::observer(): also in the threads in which backward runs on a GPU.
c10::DebugInfoKind kind_of_current() { return c10::DebugInfoKind::TEST_INFO_2; }
struct CurrentRecorder : c10::DebugInfoBase {
  explicit CurrentRecorder(Recorder* given) : recorder(given) {}
  Recorder* recorder;
};

bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

constexpr const char* kGeneratorWasSet =
    "the random generator was set in it (torch::manual_seed), which no operator shows; set it "
    "before the call";

bool is_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList() ||
         (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensor());
}

}  // namespace

Recorder::Recorder(Inputs inputs, TraceMatcher* matcher)
    : matcher_(matcher),
      memory_(graph_, allocations_, inputs),
      is_whole_(inputs == Inputs::ByTensor) {
  ensure_registered();
}

Recorder* Recorder::current() {
  const auto* current =
      static_cast<const CurrentRecorder*>(c10::ThreadLocalDebugInfo::get(kind_of_current()));
  return current == nullptr ? nullptr : current->recorder;
}

void Recorder::depend_on(const void* who, std::string what, std::function<uint64_t()> read) {
  const bool is_known =
      std::any_of(dependencies_.begin(), dependencies_.end(),
                  [&](const auto& known) { return known.who == who && known.what == what; });
  if (is_known) return;
  const auto expected = read();
  dependencies_.push_back({who, std::move(what), std::move(read), expected});
}

void Recorder::hyperparameter(const void* who, std::string name,
                              const std::shared_ptr<capture::HostNumber>& number,
                              std::function<double()> read) {
  const bool is_known = std::any_of(hyperparameters_.begin(), hyperparameters_.end(),
                                    [&](const auto& known) { return known.number == number; });
  if (is_known) return;
  allocations_.forget(number->tensor().const_data_ptr());  // it is there at later calls
  const double value = read();
  hyperparameters_.push_back({who, std::move(name), number, std::move(read), value});
}

void Recorder::name_modules(const torch::nn::Module& root) {
  paths_.try_emplace(&root, "");
  for (const auto& item : root.named_modules("", /*include_self=*/false))
    paths_.try_emplace(item.value().get(), item.key());
}

void Recorder::watch_module(const torch::nn::Module& module) {
  const auto path = paths_.find(&module);
  if (!guards_.watch_module(module, path == paths_.end() ? "" : path->second)) return;
  const auto own = module.parameters(/*recurse=*/false);
  module_parameters_.insert(module_parameters_.end(), own.begin(), own.end());
  for (const auto& child : module.children()) watch_module(*child);
}

void Recorder::enter_module(const torch::nn::Module& module, std::function<uint64_t()> read) {
  if (!paths_.contains(&module)) name_modules(module);
  const auto& path = paths_.at(&module);
  entered_.push_back(&path);
  const auto before = dependencies_.size();
  depend_on(&module, "training mode or hooks of " + (path.empty() ? module.name() : path),
            std::move(read));
  if (dependencies_.size() == before) return;
  dependencies_.back().is_of_module = true;
  watch_module(module);
}

void Recorder::end_modules() {
  std::erase_if(dependencies_, [](const auto& each) { return each.is_of_module && !each.read(); });
  for (auto& each : dependencies_) {
    if (each.is_of_module) each.expected = each.read();
  }
  guards_.end();
  if (!guards_.broken().empty()) break_off(guards_.broken());
}

bool Recorder::takes_averages() const { return compile_config().optimize_ddp != "no_optimization"; }

bool Recorder::cuts_at_buckets() const {
  return cut_ && compile_config().optimize_ddp == "ddp_optimizer";
}

void Recorder::restart(TraceMatcher* matcher) {
  matcher_ = matcher;
  calls_.clear();
  groups_.clear();
  generators_.clear();
  next_messages_.clear();
  graph_ = {};
  allocations_.clear();
  memory_.clear();
  broken_.clear();
  generator_.note();
}

void Recorder::note_parameters(const std::vector<at::Tensor>& parameters) {
  parameters_.insert(parameters_.end(), parameters.begin(), parameters.end());
}

void Recorder::before_run(const void* who, std::function<void()> action) {
  const bool is_known = std::any_of(first_actions_.begin(), first_actions_.end(),
                                    [&](const auto& known) { return known.who == who; });
  if (!is_known) first_actions_.push_back({who, std::move(action)});
}

void Recorder::at_end(const void* who, std::function<std::string()> objection) {
  objections_.insert_or_assign(who, std::move(objection));
}

void Recorder::ask_at_end() {
  for (const auto& [who, objection] : objections_) {
    if (const auto why = objection(); !why.empty()) return break_off(why);
  }
}

void Recorder::before_hidden_message() {
  if (before_hidden_) before_hidden_();
}

void Recorder::give_up(const std::string& why) {
  break_off(why);
  if (before_sending_) before_sending_();
}

void Recorder::break_off(const std::string& why) {
  if (broken_.empty()) broken_ = why;
  stop_matching();  // tensors must be there from now on
}

/// What was put off draws what it would have drawn then.
void Recorder::stop_matching() {
  auto* stopped = std::exchange(matcher_, nullptr);
  if (stopped == nullptr) return;
  if (generator_.was_set()) {
    const GeneratorWatch::Before before(generator_);
    if (broken_.empty()) broken_ = kGeneratorWasSet;
    return stopped->stop();
  }
  stopped->stop();
  generator_.note();
}

void Recorder::check_generator() {
  if (broken_.empty() && generator_.was_set()) break_off(kGeneratorWasSet);
}

void Recorder::begin_random(const void* who, bool again) {
  if (!again) check_generator();  // otherwise it was set for that
  draws_.begin(who, again);
  generator_.note();
}

void Recorder::end_random() {
  if (!draws_.is_again()) check_generator();
  draws_.end();
  generator_.note();
}

void Recorder::note_group(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  if (!sends(schema)) return;
  const auto& declared = schema.arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() != "group_name") continue;
    const auto& name = stack[stack.size() - declared.size() + i].toStringRef();
    if (std::find(groups_.begin(), groups_.end(), name) == groups_.end()) groups_.push_back(name);
  }
}

void Recorder::note_generator(at::Generator generator) {
  const auto is_it = [&](const auto& known) { return known.first == generator; };
  if (!generator.defined() || std::ranges::any_of(generators_, is_it)) return;
  const RunScope unseen;
  const std::lock_guard lock(generator.mutex());
  generators_.emplace_back(generator, generator.get_state());
}

/// In the order in which they are sent, which ranks have in common.
void Recorder::number_messages(Node& node) {
  if (!is_launch(node)) return;
  auto& next = next_messages_[group_of(node)];
  for (size_t i = 0; i < node.defined().size(); ++i) node.messages.push_back(next++);
  node.bucket_caps = bucket_caps_;
}

void Recorder::cut() {
  const std::lock_guard lock(mutex_);
  cut_();
}

void Recorder::settle() const {
  for (const auto& name : groups_) comm::await_released(*c10d::resolve_process_group(name));
}

void Recorder::run(Call& call) {
  const bool is_known = broken_.empty() && !call.node.op.empty();
  if (is_known) {
    calls_.push_back({call.node.op, call.node.arguments});
    calls_.back().bucket_caps = bucket_caps_;
  }
  if (matcher_ != nullptr) {
    // One that changes how a tensor shows its memory touches none.
    const bool is_served =
        is_known ? matcher_->serve(call.op, calls_.back(), call.stack) : broken_.empty();
    if (is_served && is_known) return;
    if (!is_served) stop_matching();
  }
  if (before_sending_ && sends(call.schema)) before_sending_();
  const RunScope run;
  call_boxed(call.op, call.stack);
}

void Recorder::record(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const std::lock_guard lock(mutex_);
  const auto& schema = op.schema();
  if (const auto known = decided_equal(schema, stack)) {
    torch::jit::drop(stack, 2);
    return torch::jit::push(stack, *known);
  }
  Call call{op, schema, stack, stack.size() - schema.arguments().size(), {}, {}, {}, {}};
  note_group(schema, stack);
  if (broken_.empty()) {
    try {
      before(call);
    } catch (const CannotRecord& why) {
      break_off(with_place(why));
    }
  }
  run(call);
  if (!broken_.empty() || call.node.op.empty()) return;
  if (is_random(call.node)) generator_.renew();
  try {
    after(call);
  } catch (const CannotRecord& why) {
    break_off(with_place(why));
  }
}

std::string Recorder::with_place(const CannotRecord& why) const {
  const bool is_known = !entered_.empty() && !entered_.back()->empty();
  return why.what() + (is_known ? ", in " + *entered_.back() : "") +
         (why.remedy.empty() ? "" : "; " + why.remedy);
}

void Recorder::before(Call& call) {
  if (is_for_allocator(call.schema)) return;
  check_operator(call.op, call.stack);
  // The tensor shows its memory otherwise; what it shows then is read as such.
  if (call.op.hasTag(at::Tag::inplace_view)) return;
  call.node.op = name_of(call.schema);
  if (!entered_.empty()) call.node.module = *entered_.back();
  call.given.assign(call.stack.begin() + static_cast<long>(call.base), call.stack.end());
  call.is_fresh.assign(call.given.size(), false);
  for (size_t i = 0; i < call.given.size(); ++i) call.node.arguments.push_back(argument(call, i));
  for (size_t i = 0; i < call.given.size(); ++i)
    call.is_written.push_back(call.is_fresh[i] || writes(call.node, i));
  if (overlap_in_lists(call.given, call.is_written))
    throw CannotRecord(call.schema.name() + " writes tensors of a list that share memory",
                       "give it tensors of their own, or write them one by one");
  for (size_t i = 0; i < call.given.size(); ++i) {
    if (!call.is_written[i] || call.is_fresh[i]) continue;
    for_each_tensor(call.given[i], [&](const at::Tensor& tensor) {
      if (tensor.defined()) memory_.before_write(tensor);
    });
  }
  if (draws_.is_open() && !is_whole_ && is_random(call.node))
    throw CannotRecord(call.schema.name() +
                       " draws random numbers in a checkpointed part, which draws them again; "
                       "compile the whole step, with its backward");
  // What is put off draws what it would have drawn before the generator was set.
  if (matcher_ != nullptr && is_random(call.node)) check_generator();
}

Argument Recorder::argument(Call& call, size_t index) {
  const auto& value = call.given[index];
  if (value.isGenerator()) note_generator(value.toGenerator());
  if (!is_tensors(value)) return Argument::of(value);
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) check_layout(call.schema, tensor);
  });
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!tensor.defined()) return Argument::of(c10::IValue());
    if (is_wrapped_number(tensor)) {
      const RunScope run;
      return Argument::of(c10::IValue(tensor.item()));
    }
    const bool overwritten = writes(call.schema, index) && overwrites(call.schema, index);
    call.is_fresh[index] = overwritten && memory_.is_fresh(tensor);
    return Argument::of(call.is_fresh[index] ? kNoValue : memory_.read(tensor));
  }
  std::vector<ValueId> values;
  for (const auto& element : value.toListRef()) {
    const bool is_there = element.isTensor() && element.toTensor().defined();
    values.push_back(is_there ? memory_.read(element.toTensor()) : kNoValue);
  }
  return Argument::of(std::move(values));
}

void Recorder::after(Call& call) {
  auto node = std::move(call.node);
  std::vector<Node> before;
  write_results(call, node, before);
  own_results(call, node);
  // All it gave is known: a view that shows the same. A check gives nothing, and stays.
  if (node.results.empty() && !call.schema.returns().empty()) return;
  for (auto& earlier : before) graph_.nodes.push_back(std::move(earlier));
  number_messages(node);
  const auto results = node.results;
  auto repeated = draws_.is_open() && is_random(node) ? repeat_draw(node) : std::vector<Node>();
  if (repeated.empty()) repeated.push_back(std::move(node));
  for (auto& one : repeated) graph_.nodes.push_back(std::move(one));
  store_written(call, results);
}

struct Recorder::Scope::Guards {
  c10::DebugInfoGuard current;
  capture::ObserverScope observer;
  Allocations::Scope allocations = {};
  RecordScope record = {};
  std::optional<nn::WatchCalls> watch = std::nullopt;
  // What autocast has cast it would keep after the recording.
  const bool keeps_casts = at::autocast::is_autocast_cache_enabled();
  ~Guards() { at::autocast::set_autocast_cache_enabled(keeps_casts); }
};

Recorder::Scope::Scope(Recorder& recorder)
    : recorder_(recorder),
      guards_(new Guards{
          c10::DebugInfoGuard(kind_of_current(), std::make_shared<CurrentRecorder>(&recorder)),
          capture::ObserverScope(&recorder)}) {
  recorder.generator_.begin();
  at::autocast::set_autocast_cache_enabled(false);
  if (recorder.watches_modules()) guards_->watch.emplace();
}

Recorder::Scope::~Scope() { recorder_.generator_.end(); }

}  // namespace tessera::compiler
