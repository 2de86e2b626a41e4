#include "compiler/trace/recorder.h"

#include <tessera/compile/config.h>

#include "base/call_boxed.h"
#include "base/same_storage.h"
#include "compiler/ir/operators.h"
#include "compiler/trace/key.h"
#include "compiler/trace/overwrites.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/enum_tag.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace tessera::compiler {
namespace {

thread_local Recorder* current_recorder = nullptr;

bool is_wrapped_number(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

void check_layout(const c10::FunctionSchema& schema, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided)
    throw CannotRecord(c10::str(schema.name(), " works on a tensor of layout ", tensor.layout()));
}

/// Throws if what the operator gives depends on values, which the program has not seen.
void check_operator(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (op.hasTag(at::Tag::dynamic_output_shape))
    throw CannotRecord(schema.name() + " gives a result whose shape depends on values");
  if (op.hasTag(at::Tag::data_dependent_output))
    throw CannotRecord(schema.name() + " reads values on the host");
  if (schema.name() == "aten::resize_" || schema.name() == "aten::set_")
    throw CannotRecord(schema.name() + " gives a tensor other memory");
  if (schema.name().starts_with("c10d::"))
    throw CannotRecord(schema.name() + " communicates in a way that is not recorded");
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    const bool is_list = kind == c10::TypeKind::ListType &&
                         result.type()->expectRef<c10::ListType>().getElementType()->kind() ==
                             c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !is_list)
      throw CannotRecord(schema.name() + " gives a result that is no tensor");
  }
}

template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) {
      if (element.isTensor()) visit(element.toTensor());
    }
  }
}

bool is_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList() ||
         (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensor());
}

}  // namespace

/// One operator on its way: what it was called with, before it ran.
struct Recorder::Call {
  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  torch::jit::Stack& stack;
  size_t base;
  torch::jit::Stack given;  // the arguments, held: the stack has the results once it ran
  Node node;
  std::vector<bool> is_fresh;    // by argument: written, and made for it
  std::vector<bool> is_written;  // by argument
};

Recorder::Recorder(Inputs inputs, StandIn* stand_in)
    : stand_in_(stand_in), memory_(graph_, births_, inputs), is_whole_(inputs == Inputs::ByTensor) {
  ensure_registered();
}

Recorder* Recorder::current() { return current_recorder; }

void Recorder::depend_on(const void* who, std::string what, std::function<uint64_t()> read) {
  const bool is_known =
      std::any_of(dependencies_.begin(), dependencies_.end(),
                  [&](const auto& known) { return known.who == who && known.what == what; });
  if (is_known) return;
  const auto expected = read();
  dependencies_.push_back({who, std::move(what), std::move(read), expected});
}

void Recorder::vary(const void* who, const std::string& name, const std::string& argument,
                    double factor, std::function<double()> read) {
  const double value = factor * read();
  auto known = std::find_if(scalars_.begin(), scalars_.end(), [&](const auto& scalar) {
    return scalar.who == who && scalar.name == name;
  });
  if (known == scalars_.end()) {
    const auto others = std::count_if(scalars_.begin(), scalars_.end(),
                                      [&](const auto& scalar) { return scalar.name == name; });
    graph_.scalars.push_back({others == 0 ? name : c10::str(name, " (", others + 1, ")")});
    known = scalars_.insert(scalars_.end(), {who, name, std::move(read)});
  }
  pending_.push_back({argument, static_cast<size_t>(known - scalars_.begin()), factor, value});
}

bool Recorder::takes_averages() const { return compile_config().optimize_ddp != "no_optimization"; }

void Recorder::before_run(const void* who, std::function<void()> action) {
  const bool is_known = std::any_of(first_actions_.begin(), first_actions_.end(),
                                    [&](const auto& known) { return known.who == who; });
  if (!is_known) first_actions_.push_back({who, std::move(action)});
}

void Recorder::give_up(const std::string& why) {
  if (broken_.empty()) broken_ = why;
  // Whoever says so goes on without operators, with tensors that must be there.
  stop_standing_in();
}

void Recorder::stop_standing_in() {
  if (auto* stopped = std::exchange(stand_in_, nullptr)) stopped->stop();
}

void Recorder::note_group(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  if (!schema.name().starts_with("_c10d_functional")) return;
  const auto& declared = schema.arguments();
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].name() != "group_name") continue;
    const auto& name = stack[stack.size() - declared.size() + i].toStringRef();
    if (std::find(groups_.begin(), groups_.end(), name) == groups_.end()) groups_.push_back(name);
  }
}

void Recorder::note_sent(const Call& call) {
  if (!is_launch(call.node)) return;
  const auto note = [&](const at::Tensor& tensor) {
    if (tensor.defined())
      sent_.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_of(tensor)));
  };
  for (const auto& value : call.given) for_each_tensor(value, note);
  for (const auto& value : call.stack) for_each_tensor(value, note);
}

void Recorder::settle() const {
  constexpr auto kPatience = std::chrono::milliseconds(50);
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto is_held = [](const auto& storage) { return storage.use_count() > 0; };
  while (std::any_of(sent_.begin(), sent_.end(), is_held) &&
         std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Recorder::run(Call& call) {
  const bool is_known = broken_.empty() && !call.node.op.empty();
  if (is_known) calls_.push_back({call.node.op, call.node.arguments});
  if (stand_in_ != nullptr) {
    // One that changes how a tensor shows its memory touches none.
    const bool is_served =
        is_known ? stand_in_->serve(call.op, calls_.back(), call.stack) : broken_.empty();
    if (is_served && is_known) return;
    if (!is_served) stop_standing_in();
  }
  const RunScope run;
  call_boxed(call.op, call.stack);
  if (is_known) note_sent(call);
}

void Recorder::record(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  Call call{op, schema, stack, stack.size() - schema.arguments().size(), {}, {}, {}, {}};
  note_group(schema, stack);
  if (broken_.empty()) {
    try {
      before(call);
    } catch (const CannotRecord& why) {
      give_up(why.what());
    }
  }
  run(call);
  if (!broken_.empty() || call.node.op.empty()) return;
  try {
    after(call);
  } catch (const CannotRecord& why) {
    give_up(why.what());
  }
}

void Recorder::before(Call& call) {
  check_operator(call.op);
  // The tensor shows its memory otherwise; what it shows then is read as such.
  if (call.op.hasTag(at::Tag::inplace_view)) return;
  call.node.op = name_of(call.schema);
  call.given.assign(call.stack.begin() + static_cast<long>(call.base), call.stack.end());
  call.is_fresh.assign(call.given.size(), false);
  for (size_t i = 0; i < call.given.size(); ++i) call.node.arguments.push_back(argument(call, i));
  for (size_t i = 0; i < call.given.size(); ++i)
    call.is_written.push_back(call.is_fresh[i] || writes(call.node, i));
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
}

Argument Recorder::argument(Call& call, size_t index) {
  const auto& value = call.given[index];
  const auto& name = call.schema.arguments()[index].name();
  if (!is_tensors(value)) return number(name, value);
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) check_layout(call.schema, tensor);
  });
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!tensor.defined()) return Argument::of(c10::IValue());
    if (is_wrapped_number(tensor)) {
      const RunScope run;
      return number(name, tensor.item());
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

Argument Recorder::number(const std::string& name, const c10::IValue& value) const {
  if (capture::VariesHere::is_open() && value.isScalar() && !value.isComplexDouble()) {
    const double number = value.toScalar().toDouble();
    for (const auto& pending : pending_) {
      if (pending.value != number || pending.argument != name) continue;
      return {.kind = Argument::Kind::Scalar,
              .scalar = static_cast<int>(pending.scalar),
              .factor = pending.factor};
    }
  }
  return Argument::of(value);
}

void Recorder::after(Call& call) {
  auto node = std::move(call.node);
  std::vector<Node> before;
  write_results(call, node, before);
  own_results(call, node);
  if (node.results.empty()) return;  // all it gave is known: a view that shows the same
  for (auto& earlier : before) graph_.nodes.push_back(std::move(earlier));
  const auto results = node.results;
  auto repeated = draws_.is_open() && is_random(node) ? repeat_draw(node) : std::vector<Node>();
  if (repeated.empty()) repeated.push_back(std::move(node));
  for (auto& one : repeated) graph_.nodes.push_back(std::move(one));
  store_written(call, results);
}

/// In place of a node that draws what was drawn before: copies of that. Empty if it is a new draw.
std::vector<Node> Recorder::repeat_draw(const Node& node) {
  const auto before = draws_.drawn_before(node.op);
  draws_.add(node.op, before.value_or(node.results));
  std::vector<Node> copies;
  for (size_t i = 0; before && i < node.results.size(); ++i) {
    const auto& from = before->at(i).values;
    const auto& to = node.results[i].values;
    for (size_t k = 0; k < to.size(); ++k) {
      if (to[k] == kNoValue) continue;
      if (k >= from.size() || from[k] == kNoValue || graph_.type(from[k]) != graph_.type(to[k]))
        throw CannotRecord(node.op + " draws other random numbers when it is computed again");
      copies.push_back({.op = "aten::clone",
                        .arguments = {Argument::of(from[k]), Argument::of(c10::IValue())},
                        .results = {Argument::of(to[k])}});
    }
  }
  return copies;
}

// After the node is there: memory may add what follows from it.
void Recorder::store_written(const Call& call, const std::vector<Argument>& results) {
  size_t result = 0;
  for (size_t i = 0; i < call.given.size(); ++i) {
    if (!call.is_written[i]) continue;
    const auto& values = results[result++].values;
    size_t position = 0;
    for_each_tensor(call.given[i], [&](const at::Tensor& tensor) {
      const auto value = values[position++];
      if (value == kNoValue) return;
      if (call.is_fresh[i])
        memory_.define(tensor, value);
      else
        memory_.write(tensor, value);
    });
  }
}

/// An elementwise operator that writes its first argument, where its functional twin gives a tensor
/// of the same dtype and strides, is recorded as the twin: passes know more of those.
bool Recorder::make_functional(const Call& call, Node& node) {
  const auto& name = call.schema.name();
  if (!name.ends_with('_') || !call.op.hasTag(at::Tag::pointwise)) return false;
  const auto& target = call.given[0].toTensor();
  if (call.is_fresh[0] || !target.is_contiguous() || overwrites(call.schema, 0)) return false;
  for (const auto& value : call.given) {
    const bool is_tensor = value.isTensor() && value.toTensor().defined();
    // Those without dimensions don't promote ones that have some.
    if (is_tensor && value.toTensor().scalar_type() != target.scalar_type() &&
        (value.toTensor().dim() > 0 || target.dim() == 0))
      return false;
  }
  const auto& overload = call.schema.overload_name();
  const auto twin =
      c10::Dispatcher::singleton().findSchema({name.substr(0, name.size() - 1), overload});
  if (!twin || twin->schema().arguments().size() != call.given.size()) return false;
  node.op = name_of(twin->schema());
  node.results.push_back(Argument::of(memory_.new_value(target)));
  return true;
}

// Note [writing operators]: the argument is a copy that nothing else uses, and is consumed. A pass
// drops the copy where the original is not needed any more.
void Recorder::write_results(Call& call, Node& node, std::vector<Node>& before) {
  if (make_functional(call, node)) return;
  for (size_t i = 0; i < call.given.size(); ++i) {
    if (!call.is_written[i]) continue;
    auto& argument = node.arguments[i];
    std::vector<at::Tensor> tensors;
    for_each_tensor(call.given[i], [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    auto result = argument;
    for (size_t k = 0; k < argument.values.size(); ++k) {
      auto& value = argument.values[k];
      if (value == kNoValue && !call.is_fresh[i]) continue;
      // A copy has no gaps.
      const auto strides = at::infer_dense_strides(tensors[k].sizes(), tensors[k].strides());
      const auto target = memory_.new_value(tensors[k]);
      graph_.type(target).strides = strides;
      if (call.is_fresh[i]) {
        before.push_back(make_empty(target, graph_.type(target)));
      } else {
        before.push_back({.op = "aten::clone",
                          .arguments = {Argument::of(value), Argument::of(c10::IValue())},
                          .results = {Argument::of(target)}});
      }
      value = target;
      result.values[k] = memory_.new_value(tensors[k]);
      graph_.type(result.values[k]).strides = strides;
    }
    node.results.push_back(std::move(result));
  }
}

void Recorder::own_results(Call& call, Node& node) {
  const size_t first = call.stack.size() - call.schema.returns().size();
  bool is_needed = !node.results.empty() || call.schema.returns().empty();
  const bool makes_anew = is_wait(node);
  struct Defined {
    at::Tensor tensor;
    ValueId value;
    size_t result, position;
  };
  std::vector<Defined> views, owners;
  auto& came = calls_.back();
  came.results.resize(call.schema.returns().size());
  for (const size_t i : own_returns(call.schema)) {
    const auto& given = call.stack[first + i];
    std::vector<ValueId> values;
    for_each_tensor(given, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        came.results[i].push_back(std::nullopt);
        return values.push_back(kNoValue);
      }
      check_layout(call.schema, tensor);
      const bool is_view = !makes_anew && memory_.knows(tensor);
      came.results[i].push_back(type_of(tensor));
      came.gave_view = came.gave_view || is_view;
      const auto same = is_view ? memory_.find_current(tensor) : std::nullopt;
      values.push_back(memory_.new_value(tensor));
      if (!same) is_needed = true;
      if (same) return;
      (is_view ? views : owners)
          .push_back({tensor, values.back(), node.results.size(), values.size() - 1});
    });
    node.results.push_back(given.isTensor() ? Argument::of(values[0])
                                            : Argument::of(std::move(values)));
  }
  if (!is_needed) {
    node.results.clear();
    return;
  }
  for (const auto& owner : owners) memory_.define(owner.tensor, owner.value);
  if (views.empty()) return;
  const auto made = std::make_shared<const Node>(node);
  for (const auto& view : views) {
    const auto parent = std::find_if(call.given.begin(), call.given.end(), [&](const auto& given) {
      return given.isTensor() && given.toTensor().defined() &&
             same_storage(given.toTensor(), view.tensor);
    });
    if (parent == call.given.end()) throw CannotRecord(node.op + " returns memory seen elsewhere");
    memory_.define_view(view.tensor, view.value,
                        {.node = made,
                         .argument = static_cast<size_t>(parent - call.given.begin()),
                         .parent = window_of(parent->toTensor()),
                         .result = view.result,
                         .position = view.position});
  }
}

struct Recorder::Scope::Guards {
  Recorder* before;
  capture::ObserverScope observer;
  Births::Scope births;
  RecordScope record;
};

Recorder::Scope::Scope(Recorder& recorder)
    : guards_(new Guards{current_recorder, capture::ObserverScope(&recorder),
                         Births::Scope(&recorder.births_), RecordScope()}) {
  current_recorder = &recorder;
}

Recorder::Scope::~Scope() { current_recorder = guards_->before; }

}  // namespace tessera::compiler
