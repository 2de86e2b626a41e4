#include "dtensor/rules/common_rules.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace tessera::dtensor {

DimMappings all_but(int64_t ndim, const std::vector<int64_t>& excluded) {
  DimMappings mappings;
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (std::find(excluded.begin(), excluded.end(), dim) == excluded.end())
      mappings.push_back({dim, dim});
  }
  return mappings;
}

std::vector<Placement> placements_of(const Operand& operand) {
  if (!operand.spec) return {Replicate()};
  std::vector<Placement> different;
  for (const auto& placement : operand.spec->placements) {
    if (std::find(different.begin(), different.end(), placement) == different.end())
      different.push_back(placement);
  }
  return different;
}

std::vector<ReduceOp::RedOpType> pending_ops(const Operand& operand, Pending pending) {
  std::vector<ReduceOp::RedOpType> ops;
  for (const auto& placement : placements_of(operand)) {
    if (!placement.is_partial() || pending == Pending::None) continue;
    const auto op = placement.reduce_op();
    if (pending == Pending::All || op == ReduceOp::SUM || op == ReduceOp::AVG) ops.push_back(op);
  }
  return ops;
}

Rows mapping_rows(const Call& call, const DimMappings& mappings, Pending pending) {
  Rows rows;
  for (const auto& [from, to, even] : mappings) {
    auto row = call.row(Shard(to));
    std::fill(row.begin() + static_cast<long>(call.output_count()), row.end(), Shard(from));
    rows.emplace_back(std::move(row), even);
  }
  for (const auto& input : call.inputs()) {
    for (const auto& operand : input.operands) {
      for (const auto op : pending_ops(operand, pending)) {
        auto row = call.row(Partial(op));
        std::fill(row.begin(), row.end(), Partial(op));
        rows.emplace_back(std::move(row));
      }
    }
  }
  return rows;
}

Rule mapping_rule(FindDimMappings find, Pending pending) {
  Rule rule;
  rule.rows = [find = std::move(find), pending](const Call& call, int64_t) {
    return mapping_rows(call, find(call), pending);
  };
  rule.takes_empty_shards = true;
  rule.takes_any_indices = true;
  return rule;
}

Sizes own_sizes(const Choice& choice, const Sizes& sizes, const Placements& placements) {
  if (!choice.mesh->is_member) return sizes;
  return local_sizes(sizes, placements, choice.mesh->mesh_shape, choice.mesh->coordinate);
}

Chunk own_chunk(const Choice& choice, int64_t size, int64_t tensor_dim,
                const Placements& placements) {
  if (!choice.mesh->is_member) return {0, size};
  return local_chunk(size, tensor_dim, placements, choice.mesh->mesh_shape,
                     choice.mesh->coordinate);
}

bool is_sharded(const Placements& placements, int64_t tensor_dim) {
  return std::any_of(placements.begin(), placements.end(),
                     [&](const auto& placement) { return placement.is_shard(tensor_dim); });
}

Adapt with_own_sizes(const char* argument, std::function<Sizes(const Call&)> result_sizes) {
  return [argument, result_sizes = std::move(result_sizes)](const Call& call, const Choice& choice,
                                                            LocalArguments& local) {
    local.set(call.index_of(argument), own_sizes(choice, result_sizes(call), choice.outputs[0]));
  };
}

void give(torch::jit::Stack& stack, at::Tensor result) {
  stack.clear();
  stack.emplace_back(std::move(result));
}

Rule no_rows() {
  return {[](const Call&, int64_t) { return Rows(); }};
}

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
