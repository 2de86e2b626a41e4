#include "state/optimizer_kind.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

namespace tessera::state {
namespace {

using Names = std::vector<std::string>;

Names sgd_names() { return {"momentum_buffer"}; }
Names adam_names() { return {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}; }
Names required_adam_names() { return {"step", "exp_avg", "exp_avg_sq"}; }

class TesseraKind final : public OptimizerKind {
 public:
  TesseraKind(const char* name, bool is_sgd) : name_(name), is_sgd_(is_sgd) {}
  const char* name() const override { return name_; }
  Names state_names() const override { return is_sgd_ ? sgd_names() : adam_names(); }
  Names required_names() const override { return is_sgd_ ? Names() : required_adam_names(); }

  optim::State read(const torch::optim::Optimizer& optimizer,
                    const at::Tensor& parameter) const override {
    return dynamic_cast<const optim::Optimizer&>(optimizer).state_of(parameter);
  }
  void write(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
             const optim::State& values) const override {
    dynamic_cast<optim::Optimizer&>(optimizer).load_state_of(parameter, values);
  }

 private:
  const char* name_;
  bool is_sgd_;
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
  Names required_names() const override { return required_; }
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

}  // namespace

std::unique_ptr<OptimizerKind> kind_of(const torch::optim::Optimizer& optimizer,
                                       const char* function) {
  using namespace torch::optim;
  if (is<optim::SGD>(optimizer)) return std::make_unique<TesseraKind>("SGD", /*is_sgd=*/true);
  if (is<optim::Adam>(optimizer)) return std::make_unique<TesseraKind>("Adam", /*is_sgd=*/false);
  if (is<optim::AdamW>(optimizer)) return std::make_unique<TesseraKind>("AdamW", /*is_sgd=*/false);
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
