#include "compiler/ir/operators.h"
#include "compiler/spmd/batch_dims.h"

namespace tessera::compiler {
namespace {

/// What a rank computes by itself, by the beginning of the operator's name.
struct Family {
  const char* prefix;
  const char* each_rank;
};
constexpr Family kFamilies[] = {
    {"aten::native_batch_norm", "statistics of its own samples"},
    {"aten::cudnn_batch_norm", "statistics of its own samples"},
    {"aten::_native_batch_norm_legit", "statistics of its own samples"},
    {"aten::var", "the variance of its own samples"},
    {"aten::std", "the deviation of its own samples"},
    {"aten::_softmax", "shares among its own samples"},
    {"aten::_log_softmax", "shares among its own samples"},
    {"aten::logsumexp", "the sum over its own samples"},
    {"aten::sort", "an order of its own samples"},
    {"aten::topk", "the largest of its own samples"},
    {"aten::cum", "a scan of its own samples"},
    {"aten::max", "the largest of its own samples"},
    {"aten::min", "the smallest of its own samples"},
    {"aten::arg", "a place among its own samples"},
    {"aten::median", "the median of its own samples"},
    {"aten::mm", "pairs of its own samples"},
    {"aten::bmm", "pairs of its own samples"},
    {"aten::addmm", "pairs of its own samples"},
    {"aten::dot", "the product of its own samples"},
    {"aten::_cdist", "distances between its own samples"},
    {"aten::linalg_vector_norm", "the norm of its own samples"},
    {"aten::norm", "the norm of its own samples"},
    {"aten::nll_loss", "a mean weighted by its own targets"},
    {"aten::div", "a quotient of its own sums"},
};

}  // namespace

std::string each_rank_computes(const Node& node) {
  for (const auto& family : kFamilies) {
    if (node.op.starts_with(family.prefix)) return family.each_rank;
  }
  return is_pointwise(node) ? "it of the sum over its own samples" : "it of its own samples alone";
}

std::string describe(const Node& node) {
  return node.module.empty() ? node.op : node.op + " in " + node.module;
}

}  // namespace tessera::compiler
