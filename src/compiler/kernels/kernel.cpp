#include "compiler/kernels/kernel.h"

#include "compiler/kernels/lane.h"
#include "compiler/kernels/names.h"
#include "compiler/kernels/row_plan.h"

#include <set>

namespace tessera::compiler {
namespace {

std::string operators_of(const Graph& body) {
  std::string text;
  std::set<std::string> seen;
  for (const Node& node : body.nodes) {
    const std::string name = short_name(node.op);
    if (!seen.insert(name).second || text.size() + name.size() > 60) continue;
    text += (text.empty() ? "" : "_") + name;
  }
  return text;
}

}  // namespace

std::vector<size_t> kernel_inputs(const Graph& body) {
  std::set<ValueId> read;
  for (size_t lane = 0; lane < kernel_lanes(body); ++lane) {
    for (const ValueId value : lane_reads(body, lane)) read.insert(value);
  }
  std::vector<size_t> inputs;
  for (size_t i = 0; i < body.inputs.size(); ++i) {
    if (read.contains(body.inputs[i].value)) inputs.push_back(i);
  }
  return inputs;
}

Kernel write_kernel(const Graph& body, c10::DeviceType device) {
  Kernel kernel{.operators = operators_of(body),
                .text = "",
                .inputs = kernel_inputs(body),
                .outputs = body.outputs.size()};
  const auto names = name_values(body);
  const bool is_host = device == c10::DeviceType::CPU;
  const bool is_over_rows = has_rows(body);
  if (is_host)
    kernel.text = (is_over_rows ? write_host_rows : write_host_kernel)(body, names, kernel.inputs);
  else if (is_sum_parts(body.nodes.at(0)))
    write_cuda_sum_parts(body, kernel);
  else if (is_list_kernel(body.nodes[0]))
    write_cuda_casts(body, kernel);
  else
    (is_over_rows ? write_cuda_rows : write_cuda_kernel)(body, names, kernel);
  return kernel;
}

}  // namespace tessera::compiler
