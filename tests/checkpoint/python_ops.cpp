// What goes through autograd's engine, as operators of Python: torch.ops.load_library(...), then
// torch.ops.tessera_autograd_test.….
#include <tessera/checkpoint.h>
#include <tessera/compile.h>

#include <torch/library.h>

namespace tessera::testing {
namespace {

int64_t runs = 0;   // of the checkpointed function
int64_t packs = 0;  // by hooks of C++

at::Tensor layer(const at::Tensor& x, const at::Tensor& weight) {
  ++runs;
  return x.matmul(weight).tanh().sin().exp();
}

at::Tensor checkpointed(const at::Tensor& x, const at::Tensor& weight) {
  return checkpoint_call(layer, x, weight);
}

/// Every operator is recomputed but products of matrices.
at::Tensor checkpointed_selectively(const at::Tensor& x, const at::Tensor& weight) {
  return checkpoint_call({.context_fn = selective_contexts(save_matmul_results())}, layer, x,
                         weight);
}

at::Tensor packed(const at::Tensor& x, const at::Tensor& weight) {
  const saved_tensor_hooks scope(
      [](const at::Tensor& tensor) {
        ++packs;
        return tensor.to(at::kDouble);
      },
      [](const at::Tensor& tensor) { return tensor.to(at::kFloat); });
  return layer(x, weight);
}

void run_backward(const at::Tensor& loss) { loss.backward(); }

std::string run_backward_compiled(const at::Tensor& loss) {
  const CompiledBackward scope(interpret);
  loss.backward();
  return scope.explain();
}

TORCH_LIBRARY(tessera_autograd_test, library) {
  library.def("checkpointed(Tensor x, Tensor weight) -> Tensor", checkpointed);
  library.def("checkpointed_selectively(Tensor x, Tensor weight) -> Tensor",
              checkpointed_selectively);
  library.def("packed(Tensor x, Tensor weight) -> Tensor", packed);
  library.def("plain(Tensor x, Tensor weight) -> Tensor", layer);
  library.def("backward(Tensor loss) -> ()", run_backward);
  library.def("compiled_backward(Tensor loss) -> str", run_backward_compiled);
  library.def("runs() -> int", [] { return runs; });
  library.def("packs() -> int", [] { return packs; });
}

}  // namespace
}  // namespace tessera::testing
