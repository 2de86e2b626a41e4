// What PowerSGD remembers between iterations, and how it is saved.
#include "replicate/local_part.h"
#include "replicate/powersgd.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <cmath>
#include <cstring>
#include <sstream>

namespace tessera {
namespace {

using powersgd::Factors;
using powersgd::Remembered;
using Saved = std::map<std::string, std::string>;

constexpr const char* kIteration = "powersgd/iteration";
constexpr const char* kRandom = "powersgd/random";

std::string key(const std::string& parameter, const char* what) {
  return "powersgd/" + parameter + "/" + what;
}

std::string bytes_of(const at::Tensor& tensor) {
  const auto host = tensor.cpu().contiguous();
  return {static_cast<const char*>(host.const_data_ptr()), host.nbytes()};
}

/// The saved tensor of this name; undefined if there is none.
at::Tensor find(const Saved& saved, const std::string& name, at::IntArrayRef sizes,
                const at::Tensor& like) {
  const auto found = saved.find(name);
  if (found == saved.end()) return {};
  auto tensor = at::empty(sizes, like.options().device(at::kCPU).requires_grad(false));
  TORCH_CHECK_VALUE(found->second.size() == tensor.nbytes(), "PowerSGDState::load: expected ",
                    tensor.nbytes(), " bytes of ", name, ", got ", found->second.size(),
                    "; load what was saved for this model with these options");
  std::memcpy(tensor.mutable_data_ptr(), found->second.data(), tensor.nbytes());
  return tensor.to(like.device());
}

}  // namespace

PowerSGDState::PowerSGDState(PowerSGDOptions options) : impl_(std::make_unique<Impl>(options)) {
  TORCH_CHECK_VALUE(options.matrix_approximation_rank >= 1,
                    "powersgd_hook: expected matrix_approximation_rank of at least 1, got ",
                    options.matrix_approximation_rank);
  TORCH_CHECK_VALUE(options.start_powerSGD_iter >= 0,
                    "powersgd_hook: expected start_powerSGD_iter of at least 0, got ",
                    options.start_powerSGD_iter);
  TORCH_CHECK_VALUE(options.min_compression_rate > 0,
                    "powersgd_hook: expected min_compression_rate above 0, got ",
                    options.min_compression_rate);
  TORCH_CHECK_VALUE(
      options.orthogonalization_epsilon >= 0 && std::isfinite(options.orthogonalization_epsilon),
      "powersgd_hook: expected orthogonalization_epsilon of at least 0, got ",
      options.orthogonalization_epsilon);
}

PowerSGDState::~PowerSGDState() = default;

BucketFuture PowerSGDHook::operator()(GradBucket& bucket) const {
  return state->impl_->average_bucket(bucket, state);
}

CommHook PowerSGDState::hook() { return PowerSGDHook{shared_from_this()}; }

CommHook powersgd_hook(PowerSGDOptions options) {
  return std::make_shared<PowerSGDState>(options)->hook();
}

Saved PowerSGDState::save(const torch::nn::Module& module) const {
  std::ostringstream random;
  random << impl_->random;
  Saved saved = {{kIteration, std::to_string(impl_->iteration)}, {kRandom, random.str()}};
  for (const auto& parameter : module.named_parameters()) {
    const auto part = replication::local_part(parameter.value());
    const auto found = impl_->memory.find(part.unsafeGetTensorImpl());
    if (found == impl_->memory.end()) continue;
    const auto& [error, q, spare] = found->second;
    if (error.defined()) saved[key(parameter.key(), "error")] = bytes_of(error);
    if (q.defined()) saved[key(parameter.key(), "q")] = bytes_of(q);
    if (spare.defined()) saved[key(parameter.key(), "spare")] = bytes_of(spare);
  }
  return saved;
}

void PowerSGDState::load(const torch::nn::Module& module, const Saved& saved) {
  Impl fresh(impl_->options);
  if (const auto found = saved.find(kIteration); found != saved.end()) {
    std::istringstream iteration(found->second);
    std::istringstream random(saved.contains(kRandom) ? saved.at(kRandom) : "");
    iteration >> fresh.iteration;
    random >> fresh.random;
    TORCH_CHECK_VALUE(iteration && random && fresh.iteration >= 0,
                      "PowerSGDState::load: expected what save() gave, got an iteration '",
                      found->second, "' or a state of random numbers that can't be read");
  }
  for (const auto& parameter : module.named_parameters()) {
    const auto tensor = replication::local_part(parameter.value());
    const auto [rows, columns, rank] = impl_->factors_of(tensor);
    Remembered remembered = {
        .error = find(saved, key(parameter.key(), "error"), tensor.sizes(), tensor),
        .q = find(saved, key(parameter.key(), "q"), {columns, rank}, tensor),
        .spare = find(saved, key(parameter.key(), "spare"), {columns, rank}, tensor)};
    TORCH_CHECK_VALUE(remembered.q.defined() == remembered.spare.defined(),
                      "PowerSGDState::load: expected q and spare of ", parameter.key(),
                      ", got only one of them; load what save() gave");
    if (remembered.error.defined() || remembered.q.defined())
      fresh.memory[tensor.unsafeGetTensorImpl()] = std::move(remembered);
  }
  *impl_ = std::move(fresh);
}

}  // namespace tessera
