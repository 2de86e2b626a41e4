#pragma once

#include <tessera/dtensor.h>
#include <tessera/nn.h>

#include "support/whole.h"

#include <torch/torch.h>

#include <map>
#include <memory>

/// The models of REQUIREMENTS.md 1.1.
namespace tessera::testing {

inline constexpr int64_t kComposeWidth = 100;

inline nn::Linear square_layer() { return nn::Linear(kComposeWidth, kComposeWidth); }

/// l1, (ReLU, Linear, ReLU), l2.
struct UnitModuleImpl : torch::nn::Module {
  UnitModuleImpl()
      : l1(register_module("l1", square_layer())),
        seq(register_module("seq", nn::Sequential(nn::ReLU(), square_layer(), nn::ReLU()))),
        l2(register_module("l2", square_layer())) {}
  at::Tensor forward(const at::Tensor& x) { return l2(seq->forward(l1(x))); }
  nn::Linear l1;
  nn::Sequential seq;
  nn::Linear l2;
};
TESSERA_MODULE(UnitModule);

struct CompositeModelImpl : torch::nn::Module {
  CompositeModelImpl()
      : l1(register_module("l1", square_layer())),
        u1(register_module("u1", UnitModule())),
        u2(register_module("u2", UnitModule())),
        l2(register_module("l2", square_layer())) {}
  at::Tensor forward(const at::Tensor& x) { return l2(u2(u1(l1(x)))); }
  nn::Linear l1;
  UnitModule u1, u2;
  nn::Linear l2;
};
TESSERA_MODULE(CompositeModel);

struct CompositeParamModelImpl : torch::nn::Module {
  CompositeParamModelImpl()
      : l(register_module("l", square_layer())),
        u1(register_module("u1", UnitModule())),
        u2(register_module("u2", UnitModule())),
        p(register_parameter("p", torch::randn({kComposeWidth, kComposeWidth}))) {
    register_buffer("buffer", torch::randn({kComposeWidth, kComposeWidth}));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::mm(u2(u1(l(x))), p); }
  nn::Linear l;
  UnitModule u1, u2;
  at::Tensor p;
};
TESSERA_MODULE(CompositeParamModel);

using InputRecord = std::map<const torch::nn::Module*, at::Tensor>;

/// Notes what its forward was last given.
struct SaveForwardInputsModuleImpl : torch::nn::Module {
  explicit SaveForwardInputsModuleImpl(std::shared_ptr<InputRecord> inputs)
      : record(std::move(inputs)), l(register_module("l", square_layer())) {}
  at::Tensor forward(const at::Tensor& x) {
    (*record)[this] = x;
    return l(x);
  }
  std::shared_ptr<InputRecord> record;
  nn::Linear l;
};
TESSERA_MODULE(SaveForwardInputsModule);

struct SaveForwardInputsModelImpl : torch::nn::Module {
  explicit SaveForwardInputsModelImpl(const std::shared_ptr<InputRecord>& inputs)
      : record(inputs),
        c1(register_module("c1", SaveForwardInputsModule(inputs))),
        c2(register_module("c2", SaveForwardInputsModule(inputs))) {}
  at::Tensor forward(const at::Tensor& x) {
    (*record)[this] = x;
    return c2(c1(x));
  }
  std::shared_ptr<InputRecord> record;
  SaveForwardInputsModule c1, c2;
};
TESSERA_MODULE(SaveForwardInputsModel);

}  // namespace tessera::testing
