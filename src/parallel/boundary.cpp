#include "parallel/boundary.h"

#include <tessera/nn/hooks.h>

#include "nn/composable.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::parallel {

std::string describe(const StyleTarget& target) {
  const auto name =
      target.path.empty() ? std::string("the module itself") : "'" + target.path + "'";
  return name + " (" + nn::name_of(target.module) + ")";
}

void require_hookable(const StyleTarget& target, const char* style) {
  TORCH_CHECK_VALUE(
      is_hookable(target.module), "parallelize_module: ", style, " expected ", describe(target),
      " to be a module whose calls can be hooked, to place what goes in and out; "
      "declare it as tessera::nn::Linear instead of torch::nn::Linear, and a class of "
      "your own with TESSERA_MODULE instead of TORCH_MODULE");
}

bool are_equal(const Placement& left, const Placement& right, int64_t ndim) {
  if (!left.is_shard() || !right.is_shard()) return left == right;
  const auto wrapped = [&](int64_t dim) { return dim < 0 ? dim + ndim : dim; };
  return wrapped(left.dim()) == wrapped(right.dim());
}

DTensor as_distributed(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& placement,
                       const Reporter& reporter, const GlobalSizes& whole) {
  if (is_dtensor(tensor)) {
    auto given = DTensor::of(tensor);
    TORCH_CHECK_VALUE(given.mesh() == mesh, reporter.style, ": expected tensors on ",
                      c10::str(mesh), " at ", reporter.module, ", got one on ",
                      c10::str(given.mesh()), "; redistribute it there, or pass its local part");
    return given;
  }
  FromLocalOptions options;
  // A rank can't tell from its own part how large the others' are, and must not guess: the sizes
  // are compared each time, since a rank that found its own unchanged would leave the others alone.
  options.run_check = placement.is_shard() && mesh.size() > 1;
  if (whole && are_equal(placement, Shard(-1), tensor.dim())) {
    options.run_check = false;
    options.shape = whole(tensor);
    options.stride = std::vector<int64_t>(options.shape->size(), 1);
    for (size_t dim = options.shape->size(); dim-- > 1;)
      (*options.stride)[dim - 1] =
          (*options.stride)[dim] * std::max<int64_t>((*options.shape)[dim], 1);
  }
  if (!options.run_check) return DTensor::from_local(tensor, mesh, {placement}, std::move(options));
  try {
    return DTensor::from_local(tensor, mesh, {placement}, std::move(options));
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, reporter.style, ": a plain tensor came to ", reporter.module,
                      " where a part placed ", c10::str(placement),
                      " is expected: ", error.what_without_backtrace(),
                      "; cut it so, or pass a DTensor, which knows its size");
  }
}

DTensor placed_at(const DTensor& tensor, const Placement& placement, bool async_op) {
  if (are_equal(tensor.placements()[0], placement, tensor.dim())) return tensor;
  return tensor.redistribute({placement}, async_op);
}

namespace {

/// The tensor in an argument or a result, if it is one and defined.
template <class Values>
at::Tensor* tensor_in(const Values& values) {
  at::Tensor* found = nullptr;
  size_t count = 0;
  values.for_each_tensor([&](at::Tensor& tensor) {
    found = &tensor;
    ++count;
  });
  return count == 1 && found->defined() ? found : nullptr;
}

}  // namespace

at::Tensor& first_tensor(nn::Arguments& arguments, const Reporter& reporter) {
  auto* tensor = arguments.size() == 0 ? nullptr : tensor_in(arguments[0]);
  TORCH_CHECK_VALUE(tensor != nullptr, reporter.style, ": expected the first argument of ",
                    reporter.module, " to be a tensor, got ",
                    arguments.size() == 0 ? "a call without arguments" : "something else");
  return *tensor;
}

at::Tensor& only_tensor(nn::Result& result, const Reporter& reporter) {
  auto* tensor = tensor_in(result);
  TORCH_CHECK_VALUE(tensor != nullptr, reporter.style, ": expected ", reporter.module,
                    " to return one tensor, got something else");
  return *tensor;
}

}  // namespace tessera::parallel
