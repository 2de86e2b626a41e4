#pragma once

#include <tessera/compile/graph.h>

#include <c10/core/DeviceType.h>

#include <string>
#include <vector>

/// What operators and values are called in generated sources.
namespace tessera::compiler {

/// Begins the names of kernels, and of nothing else: "cpp_fused_", "cuda_fused_".
const char* kernel_prefix(c10::DeviceType device);

/// "aten.add.Tensor", "torch.ops._c10d_functional.wait_tensor.default".
std::string python_name(const std::string& op);
/// "add" of "aten::add.Tensor", "div" of "aten::_foreach_div.Scalar".
std::string short_name(const std::string& op);
/// A C++ name for any text: "fc1_weight" for "fc1.weight".
std::string identifier(const std::string& text);

/// A name for every value, unlike all others: inputs are called as the user calls them, results by
/// their operator.
std::vector<std::string> name_values(const Graph& graph);

/// "aten.addmm.default(fc1_bias, argument_0, t)"; values by `names`.
std::string call_text(const Node& node, const std::vector<std::string>& names);

}  // namespace tessera::compiler
