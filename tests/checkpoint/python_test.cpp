// Checkpoints, hooks on saved tensors and compiled backwards in a Python process, beside what
// Python itself does there: its torch has an autograd engine of its own.
#include "support/peer.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

/// Runs lines of Python that find the operators of python_ops.cpp as `ops`.
void run_python(const std::string& lines) {
  if (auto reason = peer_missing()) GTEST_SKIP() << *reason;
  const std::string before =
      "torch.ops.load_library('" TESSERA_AUTOGRAD_OPS "')\n" + std::string(R"(
ops = torch.ops.tessera_autograd_test

def gradients(function, backward=lambda loss: loss.backward()):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 4, generator=generator, requires_grad=True)
    weight = torch.randn(4, 4, generator=generator, requires_grad=True)
    backward(function(x, weight).square().mean())
    return x.grad, weight.grad

def check_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other), (one, other)

expected = gradients(ops.plain)
outputs = {}
)");
  // CUDA wheels export parts of an older libstdc++, which the library must not find first.
  run_peer(before + lines, {}, {.environment = {{"LD_PRELOAD", "libstdc++.so.6"}}});
}

TEST(AutogradInPythonPeer, CheckpointsAreRecomputedByBackwardsOfBothLanguages) {
  run_python(R"(
for function in (ops.checkpointed, ops.checkpointed_selectively):
    for backward in (lambda loss: loss.backward(), ops.backward):
        before = ops.runs()
        check_equal(gradients(function, backward), expected)
        assert ops.runs() == before + 2, ops.runs() - before
)");
}

TEST(AutogradInPythonPeer, HooksOfBothLanguagesSeeTheirOwnTensors) {
  run_python(R"(
check_equal(gradients(ops.packed), expected)
assert ops.packs() > 0
packed = []
def pack(tensor):
    packed.append(tensor)
    return tensor.clone()
with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    check_equal(gradients(ops.plain), expected)
    of_plain, packed = len(packed), []
    before = ops.packs()
    check_equal(gradients(ops.packed), expected)
assert of_plain > 0
assert ops.packs() > before, "the innermost hooks count, of whichever language"
assert 0 < len(packed) < of_plain, "what is saved outside of the C++ scope is Python's"
)");
}

TEST(AutogradInPythonPeer, PythonsCheckpointsGoAroundOurs) {
  run_python(R"(
from torch.utils.checkpoint import checkpoint
ops.checkpointed(torch.ones(3, 4, requires_grad=True), torch.ones(4, 4)).sum().backward()
def recomputed(function):
    return lambda x, weight: checkpoint(function, x, weight, use_reentrant=False)
for function in (ops.plain, ops.checkpointed):
    before = ops.runs()
    check_equal(gradients(recomputed(function)), expected)
    assert ops.runs() >= before + 2
)");
}

TEST(AutogradInPythonPeer, AnomaliesAndMetadataAreKeptForPython) {
  run_python(R"(
import warnings
ops.checkpointed(torch.ones(3, 4, requires_grad=True), torch.ones(4, 4)).sum().backward()
x = torch.zeros(3, requires_grad=True)
y = x * 2
y.grad_fn.metadata["name"] = "doubled"
assert y.grad_fn.metadata == {"name": "doubled"}
with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly(check_nan=True):
    root = torch.sqrt(x) * 0
    try:
        root.sum().backward()
    except RuntimeError as error:
        assert "SqrtBackward0' returned nan" in str(error), error
    else:
        raise AssertionError("no error")
assert any("Traceback of forward call" in str(one.message) for one in caught), [str(one.message) for one in caught]
class Refused(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tensor * 2
    @staticmethod
    def backward(context, gradient):
        raise KeyError("of Python")
try:
    ops.backward(Refused.apply(x).sum())
except KeyError as error:
    assert "of Python" in str(error)
else:
    raise AssertionError("no error")
)");
}

TEST(AutogradInPythonPeer, BackwardsAreCompiled) {
  run_python(R"(
texts = []
for _ in range(4):
    check_equal(gradients(ops.plain, lambda loss: texts.append(ops.compiled_backward(loss))), expected)
assert texts[-1].startswith("captured: "), texts[-1]
)");
}

}  // namespace
}  // namespace tessera::testing
