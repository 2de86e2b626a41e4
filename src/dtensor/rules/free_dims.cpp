#include "dtensor/rules/free_dims.h"

#include <algorithm>

namespace tessera::dtensor {
namespace {

const Spec* any_spec(const Call& call) {
  for (const auto& input : call.inputs()) {
    for (const auto& operand : input.operands) {
      if (operand.spec) return operand.spec.get();
    }
  }
  return nullptr;
}

}  // namespace

FreeDims leading_dims(int64_t trailing) {
  return [trailing](const Call& call) {
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < call.operand(0).ndim() - trailing; ++dim) dims.push_back(dim);
    return dims;
  };
}

FreeDims dims_beside(const char* argument) {
  return [argument](const Call& call) {
    const int64_t ndim = call.operand(0).ndim();
    const auto taken = call.dims(argument, ndim);
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < ndim; ++dim) {
      if (std::find(taken.begin(), taken.end(), dim) == taken.end()) dims.push_back(dim);
    }
    return dims;
  };
}

FindShapes sizes_of(std::vector<size_t> inputs) {
  return [inputs = std::move(inputs)](const Call& call) {
    std::vector<Sizes> sizes;
    for (const auto input : inputs)
      sizes.push_back(call.has(input) ? call.operand(input).sizes : Sizes());
    return sizes;
  };
}

Rows alike_rows(const Call& call, const std::vector<int64_t>& dims) {
  Rows rows;
  for (const auto dim : dims) {
    auto row = call.row(Shard(dim));
    bool is_alike = true;
    for (size_t i = 0; i < call.input_count(); ++i) {
      if (!call.has(i)) continue;
      const auto& operand = call.operand(i);
      is_alike =
          is_alike && dim < operand.ndim() && operand.sizes[dim] == call.operand(0).sizes[dim];
      row[call.output_count() + i] = Shard(dim);
    }
    if (is_alike) rows.emplace_back(std::move(row));
  }
  return rows;
}

Rule alike_rule(FreeDims dims, FindShapes shapes) {
  Rule rule;
  rule.rows = [dims = std::move(dims)](const Call& call, int64_t) {
    return alike_rows(call, dims(call));
  };
  rule.takes_any_indices = true;
  rule.shapes = std::move(shapes);
  return rule;
}

Placement broadcast_shard(const Operand& operand, int64_t dim, const Sizes& result) {
  const int64_t own = dim - (static_cast<int64_t>(result.size()) - operand.ndim());
  if (own < 0 || (operand.sizes[own] == 1 && result[dim] != 1)) return Replicate();
  return Shard(own);
}

bool broadcasts_to(const Operand& operand, const Sizes& sizes) {
  const int64_t missing = static_cast<int64_t>(sizes.size()) - operand.ndim();
  if (missing < 0) return false;
  for (int64_t dim = 0; dim < operand.ndim(); ++dim) {
    if (operand.sizes[dim] != 1 && operand.sizes[dim] != sizes[dim + missing]) return false;
  }
  return true;
}

bool is_asked(const Call& call, size_t output) {
  return call.argument("output_mask").toBoolList().get(output);
}

void place_gradients(const Call& call, std::vector<Placement>& row, const Placement& input,
                     const Placement& parameters) {
  for (size_t i = 0; i < call.output_count(); ++i) {
    const auto& placement = i == 0 ? input : parameters;
    row[i] = is_asked(call, i) ? placement : Replicate();
  }
}

bool keeps_dims(const Call& call) {
  return call.has_argument("keepdim") && call.argument("keepdim").toBool();
}

int64_t reduction_of(const Call& call) { return call.argument("reduction").toInt(); }

int64_t mesh_ranks(const Call& call) { return c10::multiply_integers(any_spec(call)->mesh_shape); }

bool is_on_cpu(const Call& call) {
  return any_spec(call)->mesh.device_type() == c10::DeviceType::CPU;
}

void make_contiguous(const c10::FunctionSchema&, torch::jit::Stack& local) {
  for (auto& value : local) {
    if (value.isTensor() && value.toTensor().defined()) value = value.toTensor().contiguous();
  }
}

void scale_(const at::Tensor& tensor, double factor) {
  if (factor == 0)
    tensor.zero_();
  else if (factor != 1)
    tensor.mul_(factor);
}

}  // namespace tessera::dtensor
