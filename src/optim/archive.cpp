#include "optim/rule.h"

#include <ATen/Tensor.h>
#include <c10/util/irange.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

namespace tessera::optim {

namespace {

constexpr const char* kKind = "tessera_optimizer";

int64_t read_count(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.toInt();
}

State read_state(torch::serialize::InputArchive& archive) {
  State state;
  for (const std::string& name : archive.keys())
    archive.read(name, state[name], /*is_buffer=*/true);
  return state;
}

/// One group of an archive, read whole before anything is changed.
struct LoadedGroup {
  torch::serialize::InputArchive options;
  std::vector<State> states;  // by parameter
};

LoadedGroup read_group(torch::serialize::InputArchive& archive, size_t params) {
  LoadedGroup group;
  archive.read("options", group.options);
  for (const auto i : c10::irange(params)) {
    torch::serialize::InputArchive state;
    group.states.emplace_back();
    if (archive.try_read("state/" + std::to_string(i), state))
      group.states.back() = read_state(state);
  }
  return group;
}

}  // namespace

void Optimizer::save(torch::serialize::OutputArchive& archive) const {
  archive.write(kKind, c10::IValue(std::string(impl_->rule->name())));
  archive.write("groups", c10::IValue(static_cast<int64_t>(param_groups_.size())));
  for (const auto g : c10::irange(param_groups_.size())) {
    const std::vector<at::Tensor>& params = param_groups_[g].params();
    torch::serialize::OutputArchive group(archive.compilation_unit());
    group.write("params", c10::IValue(static_cast<int64_t>(params.size())));
    torch::serialize::OutputArchive options(archive.compilation_unit());
    param_groups_[g].options().serialize(options);
    group.write("options", options);
    for (const auto i : c10::irange(params.size())) {
      const State& tensors = state_of(params[i]);
      if (tensors.empty()) continue;
      torch::serialize::OutputArchive state(archive.compilation_unit());
      for (const auto& [name, tensor] : tensors) state.write(name, tensor, /*is_buffer=*/true);
      group.write("state/" + std::to_string(i), state);
    }
    archive.write("group/" + std::to_string(g), group);
  }
}

void Optimizer::load(torch::serialize::InputArchive& archive) {
  const char* const name = impl_->rule->name();
  c10::IValue kind;
  TORCH_CHECK_VALUE(archive.try_read(kKind, kind), name,
                    "::load: expected an archive that an optimizer of tessera::optim saved, got "
                    "another; state of torch::optim's optimizers goes in through load_state_of()");
  TORCH_CHECK_VALUE(kind.toStringRef() == name, name, "::load: expected the archive of ", name,
                    ", got one of ", kind.toStringRef(),
                    "; load it into an optimizer of that kind");
  const int64_t count = read_count(archive, "groups");
  TORCH_CHECK_VALUE(count == static_cast<int64_t>(param_groups_.size()), name,
                    "::load: the archive has a different number of parameter groups: expected ",
                    param_groups_.size(), ", got ", count, "; make the optimizer with as many");
  std::vector<LoadedGroup> groups;
  for (const auto g : c10::irange(param_groups_.size())) {
    torch::serialize::InputArchive group;
    archive.read("group/" + std::to_string(g), group);
    const int64_t params = read_count(group, "params");
    TORCH_CHECK_VALUE(params == static_cast<int64_t>(param_groups_[g].params().size()), name,
                      "::load: the archive has a parameter group of another size: expected ",
                      param_groups_[g].params().size(), " parameters in group ", g, ", got ",
                      params, "; make the optimizer with the same parameters");
    groups.push_back(read_group(group, static_cast<size_t>(params)));
  }
  for (const auto g : c10::irange(param_groups_.size())) {
    param_groups_[g].options().serialize(groups[g].options);
    for (const auto i : c10::irange(groups[g].states.size()))
      load_state_of(param_groups_[g].params()[i], groups[g].states[i]);
  }
}

}  // namespace tessera::optim
