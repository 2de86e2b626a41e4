#include "replicate/precision.h"

#include "replicate/local_part.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

namespace tessera::replication {

LoweredParameters::LoweredParameters(at::ScalarType dtype,
                                     const std::vector<at::Tensor>& parameters,
                                     std::vector<std::string> names)
    : dtype_(dtype), names_(std::move(names)) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        local_part(parameters[i]).is_same(parameters[i]),
        "replicate: expected plain parameters for mixed_precision, but '", names_[i],
        "' is distributed; leave mixed_precision out, or use fully_shard's");
    entries_.push_back({.parameter = parameters[i], .original = {}});
  }
}

LoweredParameters::~LoweredParameters() {
  for (auto& hook : hooks_) hook.remove();
}

void LoweredParameters::attach() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const auto& parameter = entries_[i].parameter;
    if (!parameter.requires_grad()) continue;
    hooks_.push_back(register_post_accumulate_grad_hook(
        parameter, [weak = weak_from_this(), i](const at::Tensor&) {
          if (const auto self = weak.lock()) self->on_gradient(i);
        }));
  }
}

bool LoweredParameters::lower() {
  const at::NoGradGuard no_grad;
  bool is_first = false;
  for (auto& [parameter, original, version] : entries_) {
    if (original.defined() || !parameter.is_floating_point() || parameter.scalar_type() == dtype_)
      continue;
    original = parameter.variable_data();
    version = parameter._version();
    // Of the parameter itself: a recorder reads its input from it at each call.
    parameter.set_data(parameter.to(dtype_));
    is_first = true;
  }
  return is_first;
}

void LoweredParameters::raise(size_t index) {
  auto& [parameter, original, version] = entries_[index];
  if (!original.defined()) return;
  parameter.set_data(std::exchange(original, {}));
  TORCH_CHECK(parameter._version() == version, "replicate: expected parameter '", names_[index],
              "' to be left alone between a forward and the end of its backward, where it shows a "
              "copy (mixed_precision), but it was written; the write is lost: update parameters "
              "after backward");
}

void LoweredParameters::on_gradient(size_t index) {
  const at::NoGradGuard no_grad;
  // All that uses it in this backward has been, or its gradient would not be complete.
  raise(index);
  const auto& parameter = entries_[index].parameter;
  auto& gradient = parameter.mutable_grad();
  if (gradient.scalar_type() != parameter.scalar_type())
    gradient = gradient.to(parameter.scalar_type());
  // Those that are frozen, or not used, get no gradient.
  open_backwards_.expect([self = shared_from_this()](int backward) {
    self->open_backwards_.close(backward);
    if (self->open_backwards_.empty()) self->raise();
  });
}

void LoweredParameters::raise() {
  for (size_t i = 0; i < entries_.size(); ++i) raise(i);
}

void cast_buffers(const std::vector<at::Tensor>& buffers, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  for (const auto& buffer : buffers) {
    if (buffer.is_floating_point()) buffer.set_data(buffer.to(dtype));
  }
}

}  // namespace tessera::replication
