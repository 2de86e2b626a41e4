// Softmax: the dimension that is normalized stays whole. And log-sigmoid, its kin.
#include "dtensor/rules/free_dims.h"

namespace tessera::dtensor {
namespace {

Rule softmax_rule(size_t result_like, FreeDims dims = dims_beside("dim")) {
  auto rule = alike_rule(std::move(dims), sizes_of({result_like}));
  rule.takes_empty_shards = true;
  return rule;
}

const Registration kSoftmax({"aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax"},
                            softmax_rule(0));
const Registration kSoftmaxBackward({"aten::_softmax_backward_data",
                                     "aten::_log_softmax_backward_data"},
                                    softmax_rule(1));

/// A missing `dim` means the last; a mask of one or two dimensions in another order has no rows.
std::vector<int64_t> unmasked_dims(const Call& call) {
  const size_t mask = call.input_count() - 1;
  if (call.operand(mask).sizes != call.operand(0).sizes) return {};
  const bool is_generic = !call.has_argument("mask_type") || call.argument("mask_type").isNone() ||
                          call.argument("mask_type").toInt() == 2;
  if (!is_generic) return {};
  return call.argument("dim").isNone() ? leading_dims(1)(call) : dims_beside("dim")(call);
}
const Registration kMasked({"aten::_masked_softmax", "aten::_masked_softmax_backward"},
                           alike_rule(unmasked_dims, sizes_of({0})));

/// input -> (output, buffer). The buffer is as large as the input or, on other devices than the
/// CPU, empty.
Rule log_sigmoid_rule() {
  auto rule = softmax_rule(0, leading_dims(0));
  rule.rows = [alike = rule.rows](const Call& call, int64_t ranks) {
    auto rows = alike(call, ranks);
    for (auto& row : rows) {
      if (!is_on_cpu(call)) row.placements[1] = Replicate();
    }
    return rows;
  };
  rule.shapes = [](const Call& call) {
    const auto& sizes = call.operand(0).sizes;
    return std::vector<Sizes>{sizes, is_on_cpu(call) ? sizes : Sizes{0}};
  };
  return rule;
}
const Registration kLogSigmoid({"aten::log_sigmoid_forward"}, log_sigmoid_rule());

}  // namespace
}  // namespace tessera::dtensor
