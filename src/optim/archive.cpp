// torch::save and torch::load, in the format of torch::optim's optimizers, which thus read ours.
#include "optim/arithmetic.h"
#include "optim/options.h"
#include "optim/rule.h"

#include <ATen/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/irange.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

namespace tessera::optim {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kKind = "tessera_optimizer";
constexpr const char* kVersion = "pytorch_version";
constexpr const char* kVersionOfFormat = "1.5.0";

at::Tensor count_tensor(size_t count) { return at::tensor(static_cast<int64_t>(count), at::kLong); }

/// One group of an archive, read whole before anything is changed.
struct LoadedGroup {
  std::unique_ptr<torch::optim::OptimizerOptions> options;
  std::vector<State> states;  // by parameter
};

/// Reads an archive whose bytes may be anybody's: what it says is believed after it was looked at.
class Reader {
 public:
  Reader(const char* optimizer, InputArchive& archive)
      : caller_(std::string(optimizer) + "::load") {
    const auto version = string(archive, kVersion);
    require(version == kVersionOfFormat,
            "expected an archive of libtorch 1.5 or newer, got one of \"",
            version.value_or("another format"), "\"; torch::save an optimizer of this kind");
    const auto kind = string(archive, kKind);
    require(!kind || *kind == optimizer, "expected the archive of ", optimizer, ", got one of ",
            kind.value_or(""), "; load it into an optimizer of that kind");
    part("the archive", archive, "state", state_);
    part("the archive", archive, "param_groups", groups_);
  }

  void check_groups(size_t expected) {
    const auto count = count_of("param_groups", groups_, "param_groups/size");
    require(count == static_cast<int64_t>(expected),
            "the archive has a different number of parameter groups: expected ", expected, ", got ",
            count, "; make the optimizer with as many");
  }

  LoadedGroup group(size_t index, const ParamGroup& own) {
    InputArchive group;
    part("param_groups", groups_, "param_groups/" + std::to_string(index), group);
    const auto where = "group " + std::to_string(index);
    const auto count = count_of(where, group, "params/size");
    require(count == static_cast<int64_t>(own.params().size()),
            "the archive has a parameter group of another size: expected ", own.params().size(),
            " parameters in ", where, ", got ", count,
            "; make the optimizer with the same parameters");
    LoadedGroup loaded;
    for (const auto i : c10::irange(own.params().size())) {
      const auto key = string(group, "params/" + std::to_string(i));
      require(key.has_value(), "expected the key of parameter ", i, " of ", where,
              ", a string, got none; the archive is damaged");
      loaded.states.push_back(state_of(*key, c10::str("parameter ", i, " of ", where)));
    }
    InputArchive options;
    part(where, group, "options", options);
    OptionValues values;
    for (const auto& name : options.keys()) options.try_read(name, values[name]);
    loaded.options = loaded_options(caller_ + ": " + where, own.options(), values);
    return loaded;
  }

 private:
  template <class... Words>
  void require(bool holds, const Words&... words) const {
    TORCH_CHECK_VALUE(holds, caller_, ": ", words...);
  }

  /// None if there is no string of this name.
  static std::optional<std::string> string(InputArchive& archive, const std::string& name) {
    c10::IValue value;
    if (!archive.try_read(name, value) || !value.isString()) return std::nullopt;
    return value.toStringRef();
  }

  void part(const std::string& where, InputArchive& archive, const std::string& name,
            InputArchive& into) const {
    c10::IValue value;
    const bool is_there = archive.try_read(name, value) && value.isModule();
    require(is_there && archive.try_read(name, into), "expected \"", name, "\" in ", where,
            ", got none; load what torch::save wrote of an optimizer");
  }

  int64_t count_of(const std::string& where, InputArchive& archive, const std::string& name) const {
    c10::IValue value;
    const bool is_count = archive.try_read(name, value) && value.isTensor() &&
                          value.toTensor().defined() && value.toTensor().numel() == 1 &&
                          value.toTensor().scalar_type() == at::kLong;
    require(is_count, "expected a count as \"", name, "\" of ", where,
            ", got none; the archive is damaged");
    return value.toTensor().item<int64_t>();
  }

  /// Empty if there is none for this key.
  State state_of(const std::string& key, const std::string& where) {
    State state;
    c10::IValue value;
    if (!state_.try_read(key, value)) return state;
    InputArchive fields;
    part("state", state_, key, fields);
    for (const auto& name : fields.keys()) {
      fields.try_read(name, value);
      require(value.isTensor() || value.isInt(), "expected a tensor or a number as \"", name,
              "\" of ", where, ", got ", value.tagKind());
      state[name] =
          value.isInt() ? at::scalar_tensor(value.toInt(), at::kLong) : value.toTensor().detach();
    }
    return state;
  }

  std::string caller_;
  InputArchive state_, groups_;
};

}  // namespace

void Optimizer::save(OutputArchive& archive) const {
  archive.write(kVersion, c10::IValue(std::string(kVersionOfFormat)));
  archive.write(kKind, c10::IValue(std::string(impl_->rule->name())));
  OutputArchive states(archive.compilation_unit());
  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", count_tensor(param_groups_.size()));
  size_t keys = 0;
  for (const auto g : c10::irange(param_groups_.size())) {
    const std::vector<at::Tensor>& params = param_groups_[g].params();
    OutputArchive group(archive.compilation_unit());
    group.write("params/size", count_tensor(params.size()));
    for (const auto i : c10::irange(params.size())) {
      const auto key = std::to_string(++keys);
      group.write("params/" + std::to_string(i), c10::IValue(key));
      const State tensors = dense_state_of(params[i]);
      if (tensors.empty()) continue;
      OutputArchive state(archive.compilation_unit());
      for (const auto& [name, tensor] : tensors)
        state.write(name, name == "step" ? c10::IValue(static_cast<int64_t>(step_value(tensor)))
                                         : c10::IValue(tensor));
      states.write(key, state);
    }
    OutputArchive options(archive.compilation_unit());
    param_groups_[g].options().serialize(options);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(g), group);
  }
  archive.write("state", states);
  archive.write("param_groups", groups);
}

void Optimizer::load(InputArchive& archive) {
  Reader reader(impl_->rule->name(), archive);
  reader.check_groups(param_groups_.size());
  std::vector<LoadedGroup> groups;
  for (const auto g : c10::irange(param_groups_.size())) {
    const std::vector<at::Tensor>& params = param_groups_[g].params();
    LoadedGroup& group = groups.emplace_back(reader.group(g, param_groups_[g]));
    const Demand demand = impl_->rule->demand(*group.options);
    for (const auto i : c10::irange(params.size()))
      check_state(c10::str(impl_->rule->name(), "::load: parameter ", i, " of group ", g),
                  *impl_->rule, demand, params[i], group.states[i]);
  }
  for (const auto g : c10::irange(param_groups_.size())) {
    write_options(param_groups_[g].options(), read_options(*groups[g].options));
    for (const auto i : c10::irange(groups[g].states.size()))
      load_state_of(param_groups_[g].params()[i], groups[g].states[i]);
  }
}

}  // namespace tessera::optim
