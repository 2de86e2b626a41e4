#include "state/optimizer_kind.h"

#include "optim/options.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <optional>
#include <typeinfo>
#include <unordered_set>
#include <utility>

namespace tessera::state {
namespace {

using Names = std::vector<std::string>;

Names required_adam_names() { return {"step", "exp_avg", "exp_avg_sq"}; }

/// What each of tessera::optim's saves.
struct TesseraNames {
  const char* kind;
  Names known;
  std::function<Names(const at::Tensor& parameter)> required;
};

Names required_of_adafactor(const at::Tensor& parameter) {
  return parameter.dim() < 2 ? Names{"step", "variance"} : Names{"step", "row_var", "col_var"};
}

TesseraNames adam_names(const char* kind) {
  return {kind, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, [](const at::Tensor&) {
            return required_adam_names();
          }};
}

/// Groups of Muon's with AdamWOptions have AdamW's state.
TesseraNames muon_names(const torch::optim::Optimizer& optimizer) {
  std::unordered_set<const c10::TensorImpl*> adamws;
  for (const auto& group : optimizer.param_groups()) {
    if (optim::read_options(group.options()).count("ns_steps") > 0) continue;
    for (const auto& parameter : group.params()) adamws.insert(parameter.unsafeGetTensorImpl());
  }
  return {"Muon",
          {"momentum_buffer", "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
          [adamws = std::move(adamws)](const at::Tensor& parameter) {
            return adamws.count(parameter.unsafeGetTensorImpl()) > 0 ? required_adam_names()
                                                                     : Names{"momentum_buffer"};
          }};
}

class TesseraKind final : public OptimizerKind {
 public:
  explicit TesseraKind(TesseraNames names) : names_(std::move(names)) {}
  const char* name() const override { return names_.kind; }
  Names state_names() const override { return names_.known; }
  Names required_names(const at::Tensor& parameter) const override {
    return names_.required(parameter);
  }

  optim::State read(const torch::optim::Optimizer& optimizer,
                    const at::Tensor& parameter) const override {
    return dynamic_cast<const optim::Optimizer&>(optimizer).dense_state_of(parameter);
  }
  void write(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
             const optim::State& values) const override {
    dynamic_cast<optim::Optimizer&>(optimizer).load_state_of(parameter, values);
  }

 private:
  const TesseraNames names_;
};

// The fields of torch::optim's states, once, for reading and writing.
template <class Visit>
void visit(torch::optim::SGDParamState& state, const Visit& field) {
  field("momentum_buffer", state.momentum_buffer());
}
template <class State, class Visit>
  requires requires(State& state) { state.exp_avg_sq(); }
void visit(State& state, const Visit& field) {
  field("step", state.step());
  field("exp_avg", state.exp_avg());
  field("exp_avg_sq", state.exp_avg_sq());
  field("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Visit>
void visit(torch::optim::RMSpropParamState& state, const Visit& field) {
  field("step", state.step());
  field("square_avg", state.square_avg());
  field("momentum_buffer", state.momentum_buffer());
  field("grad_avg", state.grad_avg());
}
template <class Visit>
void visit(torch::optim::AdagradParamState& state, const Visit& field) {
  field("step", state.step());
  field("sum", state.sum());
}

template <class State>
class TorchKind final : public OptimizerKind {
 public:
  TorchKind(const char* name, Names required) : name_(name), required_(std::move(required)) {}
  const char* name() const override { return name_; }
  Names required_names(const at::Tensor&) const override { return required_; }
  bool starts_with_state() const override {
    return std::is_same_v<State, torch::optim::AdagradParamState>;
  }
  Names state_names() const override {
    Names names;
    State state;
    visit(state, [&](const char* name, auto&) { names.emplace_back(name); });
    return names;
  }

  optim::State read(const torch::optim::Optimizer& optimizer,
                    const at::Tensor& parameter) const override {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    optim::State values;
    if (found == optimizer.state().end()) return values;
    visit(static_cast<State&>(*found->second), [&](const char* name, auto& field) {
      if constexpr (std::is_same_v<decltype(field), int64_t&>) {
        values[name] = at::scalar_tensor(field, at::kLong);
      } else {
        if (field.defined()) values[name] = field;
      }
    });
    return values;
  }

  void write(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
             const optim::State& values) const override {
    if (values.empty()) {
      optimizer.state().erase(parameter.unsafeGetTensorImpl());
      return;
    }
    auto state = std::make_unique<State>();
    visit(*state, [&](const char* name, auto& field) {
      const auto found = values.find(name);
      if (found == values.end()) return;
      if constexpr (std::is_same_v<decltype(field), int64_t&>) {
        field = found->second.template item<int64_t>();
      } else {
        const auto& value = found->second;
        field = at::empty_like(parameter).copy_(value.is_sparse() ? value.to_dense() : value);
      }
    });
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }

 private:
  const char* name_;
  Names required_;
};

template <class T>
bool is(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const T*>(&optimizer) != nullptr;
}

std::optional<TesseraNames> tessera_names(const torch::optim::Optimizer& optimizer) {
  const auto nothing = [](const at::Tensor&) { return Names(); };
  if (is<optim::SGD>(optimizer)) return TesseraNames{"SGD", {"momentum_buffer"}, nothing};
  if (is<optim::Adam>(optimizer)) return adam_names("Adam");
  if (is<optim::AdamW>(optimizer)) return adam_names("AdamW");
  if (is<optim::Muon>(optimizer)) return muon_names(optimizer);
  if (is<optim::Adafactor>(optimizer))
    return TesseraNames{
        "Adafactor", {"step", "row_var", "col_var", "variance"}, required_of_adafactor};
  return std::nullopt;
}

}  // namespace

std::unique_ptr<OptimizerKind> kind_of(const torch::optim::Optimizer& optimizer,
                                       const char* function) {
  using namespace torch::optim;
  if (auto names = tessera_names(optimizer))
    return std::make_unique<TesseraKind>(std::move(*names));
  if (is<SGD>(optimizer)) return std::make_unique<TorchKind<SGDParamState>>("SGD", Names());
  if (is<Adam>(optimizer))
    return std::make_unique<TorchKind<AdamParamState>>("Adam", required_adam_names());
  if (is<AdamW>(optimizer))
    return std::make_unique<TorchKind<AdamWParamState>>("AdamW", required_adam_names());
  if (is<RMSprop>(optimizer))
    return std::make_unique<TorchKind<RMSpropParamState>>("RMSprop", Names{"step", "square_avg"});
  if (is<Adagrad>(optimizer))
    return std::make_unique<TorchKind<AdagradParamState>>("Adagrad", Names{"step", "sum"});
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, function,
      ": expected an optimizer of tessera::optim, or SGD, Adam, AdamW, RMSprop or "
      "Adagrad of torch::optim, got ",
      c10::demangle(typeid(optimizer).name()),
      ", whose state is not known by parameter; save it with torch::save");
}

}  // namespace tessera::state
