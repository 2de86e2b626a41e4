#include "nn/module_rows.h"

namespace tessera::testing {
namespace {

namespace options = torch::nn;

TEST(NnModules, PoolsAsTorchs) {
  MODULE_ROW(AdaptiveAvgPool1d, (2), (input({2, 3, 5})));
  MODULE_ROW(AdaptiveAvgPool2d, (2), (input({2, 3, 5, 5})));
  MODULE_ROW(AdaptiveAvgPool3d, (2), (input({2, 3, 4, 4, 4})));
  MODULE_ROW(AdaptiveMaxPool1d, (2), (input({2, 3, 5})));
  MODULE_ROW(AdaptiveMaxPool2d, (2), (input({2, 3, 5, 5})));
  MODULE_ROW(AdaptiveMaxPool3d, (2), (input({2, 3, 4, 4, 4})));
  MODULE_ROW(AvgPool1d, (2), (input({2, 3, 5})));
  MODULE_ROW(AvgPool2d, (2), (input({2, 3, 5, 5})));
  MODULE_ROW(AvgPool3d, (2), (input({2, 3, 4, 4, 4})));
  MODULE_ROW(MaxPool1d, (2), (input({2, 3, 5})));
  MODULE_ROW(MaxPool2d, (2), (input({2, 3, 5, 5})));
  MODULE_ROW(MaxPool3d, (2), (input({2, 3, 4, 4, 4})));
  MODULE_ROW(LPPool1d, (options::LPPool1dOptions(2, 3)), (input({2, 3, 6}).abs()));
  MODULE_ROW(LPPool2d, (options::LPPool2dOptions(2, {2, 2})), (input({2, 3, 6, 6}).abs()));
  MODULE_ROW(LPPool3d, (options::LPPool3dOptions(2, {2, 2, 2})), (input({2, 3, 4, 4, 4}).abs()));
  MODULE_ROW(FractionalMaxPool2d, (options::FractionalMaxPool2dOptions(2).output_size(2)),
             (input({2, 3, 5, 5})));
  MODULE_ROW(FractionalMaxPool3d, (options::FractionalMaxPool3dOptions(2).output_size(2)),
             (input({2, 3, 5, 5, 5})));
}

at::Tensor pooled(int dims, bool want_indices) {
  std::vector<int64_t> sizes = {1, 1};
  sizes.resize(2 + dims, 4);
  const auto [values, places] = dims == 1   ? at::max_pool1d_with_indices(input(sizes), 2)
                                : dims == 2 ? at::max_pool2d_with_indices(input(sizes), 2)
                                            : at::max_pool3d_with_indices(input(sizes), 2);
  return want_indices ? places : values;
}

TEST(NnModules, UnpoolsAsTorchs) {
  MODULE_ROW(MaxUnpool1d, (2), (pooled(1, false), pooled(1, true)));
  MODULE_ROW(MaxUnpool2d, (2), (pooled(2, false), pooled(2, true)));
  MODULE_ROW(MaxUnpool3d, (2), (pooled(3, false), pooled(3, true)));
  MODULE_ROW(MaxUnpool1d, (2),
             (pooled(1, false), pooled(1, true), std::vector<int64_t>({1, 1, 5})));
}

}  // namespace
}  // namespace tessera::testing
