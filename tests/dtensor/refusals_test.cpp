// Operators whose rule is to refuse: everybody who holds a distributed tensor relies on its shape.
#include "dtensor/placed.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

struct Refused {
  const char* name;
  void (*call)(at::Tensor& tensor);
};

constexpr Refused kRefused[] = {
    {"squeeze_", [](at::Tensor& x) { x.squeeze_(); }},
    {"unsqueeze_", [](at::Tensor& x) { x.unsqueeze_(0); }},
    {"t_", [](at::Tensor& x) { x.t_(); }},
    {"transpose_", [](at::Tensor& x) { x.transpose_(0, 1); }},
    {"swapaxes_", [](at::Tensor& x) { x.swapaxes_(0, 1); }},
    {"swapdims_", [](at::Tensor& x) { x.swapdims_(0, 1); }},
    {"as_strided_", [](at::Tensor& x) { x.as_strided_({2}, {1}); }},
    {"resize_", [](at::Tensor& x) { x.resize_({2, 2}); }},
    {"resize_as_", [](at::Tensor& x) { x.resize_as_(x.sum(0)); }},
    {"set_", [](at::Tensor& x) { x.set_(x.clone()); }},
    {"_resize_output_", [](at::Tensor& x) { at::_resize_output_(x, {2, 2}, x.device()); }},
};

TEST(DTensorRefusals, AnotherShapeOrMemoryInPlaceOnThreads) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& [name, call] : kRefused) {
      at::Tensor tensor = placed(numbered({4, 3}), mesh, {Shard(0)});
      try {
        call(tensor);
        ADD_FAILURE() << name << " was expected to throw";
      } catch (const c10::NotImplementedError& error) {
        EXPECT_THAT(error.what_without_backtrace(),
                    ::testing::HasSubstr("can't be given another shape or memory in place"))
            << name;
      }
      EXPECT_EQ(tensor.sizes(), at::IntArrayRef({4, 3})) << name;
    }
  });
}

}  // namespace
}  // namespace tessera::testing
