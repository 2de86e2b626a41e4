#include "train/attention.h"

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>

#include <algorithm>
#include <vector>

namespace tessera::train {

void choose_attention(const Settings& settings) {
  using at::SDPBackend;
  const bool is_default = settings.attention == "auto" && settings.precision == "fp32";
  if (settings.device == "cpu" || is_default) return;
  const auto first = settings.attention == "flash"  ? SDPBackend::flash_attention
                     : settings.attention == "math" ? SDPBackend::math
                                                    : SDPBackend::cudnn_attention;
  std::vector<int64_t> order;
  for (const auto backend : at::globalContext().sDPPriorityOrder())
    order.push_back(static_cast<int64_t>(backend));
  std::ranges::stable_partition(
      order, [&](int64_t backend) { return backend == static_cast<int64_t>(first); });
  at::globalContext().setSDPPriorityOrder(order);
}

}  // namespace tessera::train
