#include "compiler/record/recording.h"

#include <tessera/dtensor.h>

#include "base/storage.h"
#include "base/text.h"
#include "compiler/ir/difference.h"
#include "compiler/record/dispatch_key.h"
#include "dtensor/part.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

namespace tessera::compiler {
namespace {

bool may_have_gradient(const at::Tensor& tensor) {
  return tensor.requires_grad() && tensor.is_leaf();
}

/// Finishes one recording: names the inputs and says what comes out.
class RecordingBuilder {
 public:
  /// `known`: parameters that may be distributed, of which the recorder sees this rank's parts.
  RecordingBuilder(Recorder& recorder, Recording& recording, const std::vector<at::Tensor>& known)
      : recorder_(recorder), memory_(recorder.memory()), recording_(recording), known_(known) {}

  void add_results(const std::vector<at::Tensor>& results) {
    for (const auto& whole : results) {
      const auto result = whole.defined() ? dtensor::local_part(whole) : whole;
      if (result.defined() && !result.has_storage())
        throw CannotRecord(c10::str("it returns a tensor of layout ", result.layout(),
                                    ", which has no memory of its own; return a dense one"));
      auto& distributed = recording_.distributed.emplace_back();
      if (dtensor::has_part(whole))
        distributed = {dtensor::part_of(whole).spec, whole.sizes().vec(), whole.strides().vec()};
      const auto value = result.defined() ? memory_.read(result) : kNoValue;
      if (result.defined()) note_alias(result);
      if (result.defined()) keep(result);
      recorder_.graph().outputs.push_back({value, OutputKind::Result, kNoValue});
    }
  }

  void add_gradients(const std::map<const c10::TensorImpl*, at::Tensor>& before) {
    for (size_t i = 0; i < memory_.inputs().size(); ++i) {
      const auto& [value, tensor, is_constant, content] = memory_.inputs()[i];
      const auto parameter = is_constant ? at::Tensor() : parameter_of(tensor);
      if (!parameter.defined()) continue;
      const auto known = before.find(parameter.unsafeGetTensorImpl());
      GradientOwner owner{parameter, value, std::nullopt};
      if (known != before.end()) {
        owner.had_gradient = known->second.defined();
        owner.before = part_of(known->second);
        owner.spec_before = spec_of(known->second);
      }
      owner.spec = spec_of(parameter.grad());
      recording_.gradients.push_back(owner);
      add_gradient(owner);
    }
  }

  /// Of a distributed parameter, or one of fully_shard, a recorder sees a tensor in the same
  /// memory, or nothing; neither tells when it is frozen or needs a gradient again.
  void add_needs() {
    for (const auto* parameters : {&known_, &recorder_.module_parameters()}) {
      for (const auto& parameter : *parameters) {
        const auto part = dtensor::local_part(parameter);
        const auto is_used = [&](const RecordedInput& input) {
          return !input.is_constant && !input.tensor.is_same(parameter) &&
                 shows_same_memory(part, input.tensor);
        };
        if (part.numel() == 0 || std::ranges::any_of(memory_.inputs(), is_used))
          recording_.need_gradients.emplace_back(parameter.getIntrusivePtr(),
                                                 parameter.requires_grad());
      }
    }
  }

  /// Parameters that it does not use: zero_grad() clears the gradients of those, too.
  void add_unused(const std::map<const c10::TensorImpl*, at::Tensor>& before) {
    for (const auto& parameter : known_) {
      const auto is_it = [&](const auto& owner) { return owner.parameter.is_same(parameter); };
      if (std::ranges::any_of(recording_.gradients, is_it)) continue;
      if (std::ranges::any_of(recording_.unused, is_it)) continue;
      // No operator shows a tensor without elements, but it has a gradient like any other.
      if (parameter.grad().defined() && dtensor::local_part(parameter).numel() == 0) {
        keep(part_of(parameter.grad()));
        recording_.empty.push_back(parameter);
        continue;
      }
      auto& added = recording_.unused.emplace_back(UnusedParameter{parameter});
      const auto known = before.find(parameter.unsafeGetTensorImpl());
      if (known != before.end() && known->second.defined())
        added.is_cleared = !parameter.grad().defined();
    }
  }

  void add_writes() {
    for (size_t i = 0; i < memory_.inputs().size(); ++i) {
      const auto& input = memory_.inputs()[i];
      if (input.is_constant) continue;
      if (const auto value = memory_.written(i))
        recorder_.graph().outputs.push_back({*value, OutputKind::Write, input.value});
    }
  }

  void name_inputs(const TensorNames& names) {
    auto& inputs = recorder_.graph().inputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& [value, tensor, is_constant, content] = memory_.inputs()[i];
      if (const auto* known = names.find(tensor)) {
        inputs[i].kind = known->first;
        inputs[i].name = known->second;
        if (known->first == InputKind::Argument) check_argument(tensor, known->second);
      } else if (const auto* number = find_hyperparameter(tensor)) {
        inputs[i].kind = InputKind::State;
        inputs[i].name = number->name;
      } else if (may_have_gradient(tensor)) {
        inputs[i].kind = InputKind::Parameter;
        inputs[i].name = c10::str("parameter ", i);
      } else {
        inputs[i].name = c10::str(is_constant ? "constant " : "outside ", i);
      }
    }
    // A gradient is found through its parameter.
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (const auto& owner : recording_.gradients) {
        // The function may have cleared the one that it read.
        for (const auto& gradient : {part_of(owner.parameter.grad()), owner.before}) {
          if (!gradient.defined() || !same_storage(gradient, memory_.inputs()[i].tensor)) continue;
          if (inputs[i].kind == InputKind::Argument)
            throw CannotRecord(inputs[i].name +
                               " is the gradient of a parameter; give it as a clone, or read the "
                               "gradient in the function");
          inputs[i].kind = InputKind::Gradient;
        }
      }
    }
  }

  /// A tensor of the step that somebody holds besides its caller: a list of losses would get those
  /// of recorded calls alone.
  void check_kept() {
    const auto alive = memory_.alive();
    std::map<const c10::StorageImpl*, size_t> ours = kept_;
    for (const auto& memory : alive) ++ours[memory.storage.get()];
    for (const auto& memory : alive) {
      const bool is_empty = memory.storage->nbytes() == 0 ||
                            std::ranges::find(memory.root.sizes, 0) != memory.root.sizes.end();
      if (is_empty || memory.storage.use_count() <= ours[memory.storage.get()]) continue;
      recording_.keeps_tensors = true;
      recorder_.give_up(c10::str(
          "a tensor that was made inside, of sizes ", c10::IntArrayRef(memory.root.sizes),
          maker_of(memory.value),
          kept_.contains(memory.storage.get()) ? ", which it returns or leaves as a gradient,"
                                               : ",",
          " is still held after it returned: what keeps it (a list, a member, a variable outside, "
          "history of a tensor that is held, an optimizer's first step, the gradient of a "
          "distributed parameter of a module that is neither given nor named) would not see that "
          "of later calls; return it, and keep it outside of the function"));
    }
  }

 private:
  /// For a message: ", by aten::add.Tensor in blocks.0".
  std::string maker_of(ValueId value) const {
    for (const auto& node : recorder_.graph().nodes) {
      const auto made = node.defined();
      if (std::find(made.begin(), made.end(), value) == made.end()) continue;
      return ", by " + node.op + (node.module.empty() ? "" : " in " + node.module);
    }
    return {};
  }

  /// The parameter of which the tensor is all, or this rank's part; undefined if there is none.
  at::Tensor parameter_of(const at::Tensor& tensor) const {
    if (may_have_gradient(tensor)) return tensor;
    for (const auto& parameter : known_) {
      if (parameter.requires_grad() && shows_same_memory(dtensor::local_part(parameter), tensor))
        return parameter;
    }
    return {};
  }

  /// Operators on the parameter would be taken for operators on the argument, which is another
  /// tensor at the next call.
  void check_argument(const at::Tensor& argument, const std::string& name) const {
    for (const auto* parameters : {&known_, &recorder_.module_parameters()}) {
      for (const auto& parameter : *parameters) {
        const auto part = dtensor::local_part(parameter);
        if (part.is_same(argument) || !part.has_storage() || !same_storage(part, argument))
          continue;
        const auto own = bytes_of(part), given = bytes_of(argument);
        if (own.first < given.second && given.first < own.second)
          throw CannotRecord(name +
                             " lies in the memory of a parameter that it uses; give it as a clone");
      }
    }
  }

  /// This rank's part of a gradient, if there is one.
  static at::Tensor part_of(const at::Tensor& gradient) {
    return gradient.defined() ? dtensor::local_part(gradient) : gradient;
  }

  static dtensor::SpecPtr spec_of(const at::Tensor& gradient) {
    return dtensor::has_part(gradient) ? dtensor::part_of(gradient).spec : dtensor::SpecPtr();
  }

  void note_alias(const at::Tensor& result) {
    const auto window = window_of(result);
    for (size_t i = 0; i < memory_.inputs().size(); ++i) {
      const auto& input = memory_.inputs()[i];
      const bool is_like = !input.is_constant && input.tensor.scalar_type() == window.dtype &&
                           input.tensor.is_conj() == window.is_conjugate;
      if (!is_like || !same_storage(input.tensor, result)) continue;
      recording_.aliases.push_back({recorder_.graph().outputs.size(), i, window,
                                    window.offset - input.tensor.storage_offset()});
      return;
    }
  }

  const Hyperparameter* find_hyperparameter(const at::Tensor& tensor) const {
    const auto& known = recorder_.hyperparameters();
    const auto found = std::ranges::find_if(
        known, [&](const auto& each) { return shows_same_memory(each.number->tensor(), tensor); });
    return found == known.end() ? nullptr : &*found;
  }

  void keep(const at::Tensor& tensor) { ++kept_[storage_of(tensor)]; }

  void add_gradient(const GradientOwner& owner) {
    auto& outputs = recorder_.graph().outputs;
    const auto gradient = part_of(owner.parameter.grad());
    if (!gradient.defined()) {
      if (owner.had_gradient.value_or(true))
        outputs.push_back({kNoValue, OutputKind::Gradient, owner.input});
      return;
    }
    keep(gradient);
    const bool was_there = std::any_of(
        memory_.inputs().begin(), memory_.inputs().end(), [&](const RecordedInput& input) {
          return !input.is_constant && same_storage(input.tensor, gradient);
        });
    if (was_there || !memory_.knows(gradient)) return;  // unchanged, or written like any input
    outputs.push_back({memory_.read(gradient), OutputKind::Gradient, owner.input});
  }

  Recorder& recorder_;
  Memory& memory_;
  Recording& recording_;
  const std::vector<at::Tensor>& known_;
  std::map<const c10::StorageImpl*, size_t> kept_;  // what the step leaves, and by how many tensors
};

/// What the larger of two recordings uses more than the other, for a message.
std::string extra_inputs(const Recording& first, const Recording& second) {
  const bool is_first = first.inputs.size() > second.inputs.size();
  const auto& larger = (is_first ? first : second).graph;
  std::multiset<std::string> others;
  for (const auto& input : (is_first ? second : first).graph.inputs) others.insert(input.name);
  std::vector<std::string> extra;
  for (const auto& input : larger.inputs) {
    if (const auto known = others.find(input.name); known != others.end()) {
      others.erase(known);
      continue;
    }
    const auto& type = larger.type(input.value);
    extra.push_back(c10::str(input.name, " of sizes ", c10::IntArrayRef(type.sizes)));
  }
  return extra.empty() ? "" : "; besides " + format_list(extra);
}

bool same_tensor(const RecordedInput& first, const RecordedInput& second) {
  if (first.is_constant != second.is_constant) return false;
  if (!first.is_constant) return first.tensor.is_same(second.tensor);
  const RunScope run;
  return first.tensor.sizes() == second.tensor.sizes() &&
         first.tensor.scalar_type() == second.tensor.scalar_type() &&
         first.tensor.equal(second.tensor);
}

/// Of the tensors that two recordings use.
std::string different_inputs(const Recording& first, const Recording& second) {
  if (first.inputs.size() != second.inputs.size())
    return c10::str("the number of tensors it uses: ", first.inputs.size(), ", then ",
                    second.inputs.size(), extra_inputs(first, second));
  for (size_t i = 0; i < first.inputs.size(); ++i) {
    const auto& input = first.graph.inputs[i];
    if (input.kind != second.graph.inputs[i].kind) return "what it uses of " + input.name;
    const bool by_identity = input.kind != InputKind::Argument && input.kind != InputKind::Gradient;
    if (by_identity && first.inputs[i].is_constant && second.inputs[i].is_constant &&
        !same_tensor(first.inputs[i], second.inputs[i]))
      return c10::str("a tensor that it makes without an operator (", input.name, ", sizes ",
                      first.inputs[i].tensor.sizes(),
                      ") holds other numbers at each call: those of the host, or what lay in "
                      "memory that it fills by parts; pass it as an argument, or begin with zeros");
    if (by_identity && !same_tensor(first.inputs[i], second.inputs[i]))
      return c10::str("a tensor it uses from outside (", input.name, ", sizes ",
                      first.inputs[i].tensor.sizes(),
                      ") is another one at each call; pass it as an argument");
  }
  return {};
}

/// What is still on its way comes by operators that belong to the function.
void wait_for_parts(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (dtensor::has_part(tensor)) dtensor::part_of(tensor).local();
  }
}

/// Of where distributed gradients and results lie.
std::string different_placements(const Recording& first, const Recording& second) {
  const auto same = [](const GradientOwner& one, const GradientOwner& other) {
    const bool both_had_one = one.spec_before && other.spec_before;
    return one.spec == other.spec && (!both_had_one || one.spec_before == other.spec_before);
  };
  if (first.gradients.size() == second.gradients.size() &&
      !std::ranges::equal(first.gradients, second.gradients, same))
    return "the placements of a distributed gradient";
  return first.distributed == second.distributed ? "" : "the placements of what it returns";
}

}  // namespace

void TensorNames::add(const at::Tensor& tensor, InputKind kind, const std::string& name) {
  if (tensor.defined() && tensor.has_storage())
    names_.try_emplace({storage_of(tensor), window_of(tensor)}, kind, name);
}

const std::pair<InputKind, std::string>* TensorNames::find(const at::Tensor& tensor) const {
  const auto found = names_.find({storage_of(tensor), window_of(tensor)});
  return found == names_.end() ? nullptr : &found->second;
}

Recording record(c10::function_ref<std::vector<at::Tensor>()> function,
                 const std::vector<at::Tensor>& arguments, const TensorNames& names,
                 const std::vector<at::Tensor>& parameters, Guards guards) {
  std::map<const c10::TensorImpl*, at::Tensor> gradients;
  for (const auto& parameter : parameters)
    gradients[parameter.unsafeGetTensorImpl()] = parameter.grad();
  Recorder recorder;
  recorder.guards() = std::move(guards);
  for (const auto* root : names.roots) recorder.name_modules(*root);
  for (const auto* root : names.roots) recorder.watch_module(*root);
  for (const auto& argument : arguments) {
    if (argument.defined() && argument.has_storage() && argument.numel() > 0)
      recorder.memory().read(argument);
  }
  Recording recording;
  {
    auto& results = recording.results;
    {
      const Recorder::Scope scope(recorder);
      results = function();
      wait_for_parts(results);
      for (const auto* owners : {&parameters, &recorder.parameters()}) {
        for (const auto& parameter : *owners) wait_for_parts({parameter.grad()});
      }
    }
    // As a program's: their history would keep what was made inside.
    for (auto& result : results) {
      if (result.defined()) result = result.detach();
    }
    recorder.check_generator();
    recorder.ask_at_end();
    auto known = parameters;
    known.insert(known.end(), recorder.parameters().begin(), recorder.parameters().end());
    RecordingBuilder finish(recorder, recording, known);
    if (recorder.broken().empty()) {
      try {
        finish.add_results(results);
        finish.add_gradients(gradients);
        finish.add_unused(gradients);
        finish.add_needs();
        finish.add_writes();
        finish.name_inputs(names);
        recorder.settle();
        finish.check_kept();
      } catch (const CannotRecord& why) {
        recorder.give_up(why.what());
      }
    }
  }
  recording.inputs = recorder.memory().inputs();
  recorder.end_modules();
  recording.dependencies = recorder.dependencies();
  recording.hyperparameters = recorder.hyperparameters();
  recording.guards = std::move(recorder.guards());
  recording.first_actions = recorder.first_actions();
  recording.groups = recorder.groups();
  recording.noted = recorder.parameters();
  recording.generators = recorder.generators();
  recording.broken = recorder.broken();
  recording.graph = std::move(recorder.graph());
  return recording;
}

std::string difference(const Recording& first, const Recording& second) {
  auto found = different_inputs(first, second);
  if (found.empty()) found = first_difference(first.graph, second.graph);
  return found.empty() ? different_placements(first, second) : found;
}

}  // namespace tessera::compiler
