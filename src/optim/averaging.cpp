#include <tessera/optim/averaging.h>

#include "base/capture.h"
#include "dtensor/part.h"
#include "optim/quantized.h"

#include <ATen/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/api/include/torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tessera::optim {
namespace {

/// A copy, of the same part if it is distributed.
at::Tensor copy_of(const at::Tensor& tensor) {
  at::Tensor copy = tensor.detach().clone();
  const auto packed = dtensor::packed_rows(tensor);
  if (packed.parts > 1) dtensor::remember_packed(copy, packed);
  return copy;
}

/// The submodule of `root` at a dotted path, made where there is none; and the last part.
std::pair<torch::nn::Module*, std::string> place_of(torch::nn::Module& root,
                                                    const std::string& name) {
  torch::nn::Module* module = &root;
  size_t begin = 0;
  for (size_t dot = 0; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1) {
    const std::string part = name.substr(begin, dot - begin);
    const auto children = module->named_children();
    const auto* child = children.find(part);
    module = child != nullptr
                 ? child->get()
                 : module->register_module(part, std::make_shared<torch::nn::Module>(part)).get();
  }
  return {module, name.substr(begin)};
}

}  // namespace

struct ExponentialMovingAverage::Impl {
  /// A tensor of the module and its average.
  struct Averaged {
    at::Tensor own, average;
    bool is_mean;  // else a copy of the last
  };
  torch::nn::Module& source;
  const ExponentialMovingAverageOptions options;
  const std::shared_ptr<torch::nn::Module> averages =
      std::make_shared<torch::nn::Module>("ExponentialMovingAverage");
  at::Tensor updates;
  std::vector<Averaged> tensors;
  bool is_exchanged = false;

  Impl(torch::nn::Module& module, ExponentialMovingAverageOptions given)
      : source(module), options(given) {
    updates = averages->register_buffer("n_averaged", at::zeros({}, at::kLong));
    for (const auto& item : source.named_parameters()) {
      const auto [place, name] = place_of(*averages, "module." + item.key());
      place->register_parameter(name, add(item.value()), /*requires_grad=*/false);
    }
    if (!options.use_buffers) return;
    for (const auto& item : source.named_buffers()) {
      const auto [place, name] = place_of(*averages, "module." + item.key());
      place->register_buffer(name, add(item.value()));
    }
  }

  double decay() const {
    if (!options.warmup) return options.decay;
    const auto count = static_cast<double>(updates.item<int64_t>());
    return std::min(options.decay, (1 + count) / (10 + count));
  }

  /// Both sharded, or both whole.
  void check_alike(const char* function) const {
    for (const auto& one : tensors) {
      TORCH_CHECK_VALUE(dtensor::has_part(one.own) == dtensor::has_part(one.average), function,
                        ": expected weights that lie on ranks as they did when their average was "
                        "made, got some that fully_shard shows otherwise between forward and "
                        "backward; call it after backward, or reshard() first");
    }
  }

  void average_parts() const {
    using Lists = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;
    std::map<std::pair<std::string, at::ScalarType>, Lists> lists;
    for (const auto& [own, average, is_mean] : tensors) {
      if (!is_mean) {
        average.copy_(own);
        continue;
      }
      const at::Tensor part = dtensor::local_part(average);
      if (part.scalar_type() == at::kBFloat16) {
        // It would not hold what a step adds: Note [dither].
        const at::Tensor value = dtensor::local_part(own).detach().to(at::kFloat);
        round_into(part, part.to(at::kFloat).lerp_(value, 1 - decay()),
                   thresholds_at(updates, part.device()));
        continue;
      }
      auto& [averages_of, values] = lists[{part.device().str(), part.scalar_type()}];
      averages_of.push_back(part);
      values.push_back(dtensor::local_part(own).detach());
    }
    const double weight = 1 - decay();
    for (auto& [key, list] : lists) at::_foreach_lerp_(list.first, list.second, weight);
  }

  void exchange() {
    check_alike("AveragedWeights");
    const at::NoGradGuard no_grad;
    // The very tensors: writes to shards may have to wait for other ranks.
    for (const auto& [own, average, is_mean] : tensors) {
      const at::Tensor value = own.detach().clone();
      own.copy_(average);
      average.copy_(value);
    }
    is_exchanged = !is_exchanged;
  }

 private:
  at::Tensor add(const at::Tensor& own) {
    if (!own.defined()) return {};
    const auto known = std::ranges::find_if(
        tensors, [&](const Averaged& one) { return one.own.is_same(own); });  // a tied weight
    if (known != tensors.end()) return known->average;
    tensors.push_back(
        {own, copy_of(own), at::isFloatingType(own.scalar_type()) || own.is_complex()});
    return tensors.back().average;
  }
};

ExponentialMovingAverage::ExponentialMovingAverage(nn::ModuleRef module,
                                                   ExponentialMovingAverageOptions options) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(options.decay >= 0 && options.decay <= 1,
                    "ExponentialMovingAverage: expected decay from 0 to 1, got ", options.decay,
                    "; correct the option");
  impl_ = std::make_unique<Impl>(*module, options);
}

ExponentialMovingAverage::~ExponentialMovingAverage() = default;

void ExponentialMovingAverage::update() {
  TORCH_CHECK_VALUE(!impl_->is_exchanged,
                    "ExponentialMovingAverage::update: expected the weights of the training in the "
                    "module, got the averages, since an AveragedWeights is there; end it first");
  capture::tell([](capture::Observer& observer) {
    observer.give_up(
        "it updates an ExponentialMovingAverage, which counts on the host; update it after the "
        "compiled step");
  });
  impl_->check_alike("ExponentialMovingAverage::update");
  const at::NoGradGuard no_grad;
  if (n_averaged() == 0) {
    for (const auto& [own, average, is_mean] : impl_->tensors) average.copy_(own.detach());
  } else {
    impl_->average_parts();
  }
  impl_->updates.add_(1);
}

int64_t ExponentialMovingAverage::n_averaged() const { return impl_->updates.item<int64_t>(); }

torch::nn::Module& ExponentialMovingAverage::module() {
  TORCH_CHECK_VALUE(
      !impl_->is_exchanged,
      "ExponentialMovingAverage::module: expected the averages in it, got the weights of "
      "the training, since an AveragedWeights is there; save the module itself, or end it");
  return *impl_->averages;
}

AveragedWeights::AveragedWeights(ExponentialMovingAverage& average) : average_(average) {
  TORCH_CHECK_VALUE(!average.impl_->is_exchanged,
                    "AveragedWeights: expected one at a time, got a second; end the first");
  average.impl_->exchange();
}

AveragedWeights::~AveragedWeights() noexcept(false) {
  if (std::uncaught_exceptions() == 0) {
    average_.impl_->exchange();
    return;
  }
  try {
    average_.impl_->exchange();
  } catch (const std::exception& error) {  // a second one would end the process
    TORCH_WARN("AveragedWeights: the module is left with averages in place of its weights: ",
               error.what());
  }
}

}  // namespace tessera::optim
