// Parts of memory as operators: a tensor seen with other sizes and strides, from `offset` elements
// after its first one. Unlike as_strided, whose offset counts from the start of the storage, they
// mean the same for a tensor that lies elsewhere. And marks: where a step has a parameter's
// gradient, and where it may end for this time.
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

namespace tessera::compiler {
namespace {

at::Tensor window(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                  int64_t offset) {
  return self.as_strided(sizes, strides, self.storage_offset() + offset);
}

at::Tensor window_scatter(const at::Tensor& self, const at::Tensor& source, at::IntArrayRef sizes,
                          at::IntArrayRef strides, int64_t offset) {
  auto result = at::empty_strided(self.sizes(), self.strides(), self.options());
  result.copy_(self);
  result.as_strided(sizes, strides, offset).copy_(source);
  return result;
}

at::Tensor gradient(const at::Tensor& self, const at::Tensor& /*parameter*/) {
  return self.clone();
}

void next_iteration() {}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, library) {
  library.def("window(Tensor(a) self, int[] size, int[] stride, int offset) -> Tensor(a)");
  library.def(
      "window_scatter(Tensor self, Tensor source, int[] size, int[] stride, int offset) -> Tensor");
  library.def("gradient(Tensor self, Tensor parameter) -> Tensor");
  library.def("next_iteration() -> ()");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, library) {
  library.impl("window", &window);
  library.impl("window_scatter", &window_scatter);
  library.impl("gradient", &gradient);
  library.impl("next_iteration", &next_iteration);
}

}  // namespace tessera::compiler
