#include "base/capture.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <atomic>
#include <memory>

namespace tessera::capture {
namespace {

// Of all that a thread has, libtorch hands this on to the threads in which autograd runs backward
// on a GPU. The kind is one that libtorch itself leaves alone.
c10::DebugInfoKind kind() { return c10::DebugInfoKind::TEST_INFO; }
struct Current : c10::DebugInfoBase {
  explicit Current(Observer* given) : observer(given) {}
  Observer* observer;
};

at::Tensor copy(const at::Tensor& tensor) { return tensor.clone(); }

/// With a graph of its own: a leaf could not be written in place, as its original might.
struct Again : torch::autograd::Function<Again> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& tensor) {
    static const auto kOp = c10::Dispatcher::singleton()
                                .findSchemaOrThrow(kAgain, "")
                                .typed<at::Tensor(const at::Tensor&)>();
    return kOp.call(tensor);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

}  // namespace

HostNumber::HostNumber(c10::Device device, at::ScalarType dtype) {
  const Hidden hidden;
  tensor_ = at::empty({}, at::device(device).dtype(dtype));
}

void HostNumber::set(double value) {
  // NaN is written each time, which is right.
  if (held_ == value) return;
  const Hidden hidden;
  const at::NoGradGuard no_grad;
  tensor_.fill_(value);
  held_ = value;
}

Observer::Observer()
    : number([] {
        static std::atomic<uint64_t> last = 0;
        return ++last;
      }()) {}

Observer* observer() {
  const auto* current = static_cast<const Current*>(c10::ThreadLocalDebugInfo::get(kind()));
  return current == nullptr ? nullptr : current->observer;
}

ObserverScope::ObserverScope(Observer* observer)
    : guard_(kind(), std::make_shared<Current>(observer)) {}
ObserverScope::~ObserverScope() = default;

c10::impl::LocalDispatchKeySet without_recorder(c10::impl::LocalDispatchKeySet keys) {
  using c10::DispatchKeySet;
  // The recorder's bits alone: without BackendSelect no factory would work.
  keys.included_ = DispatchKeySet(
      DispatchKeySet::RAW, keys.included_.raw_repr() & ~DispatchKeySet(kRecordKey).raw_repr());
  return keys;
}

Hidden::Hidden() : keys_(c10::impl::tls_local_dispatch_key_set()), observer_(nullptr) {
  c10::impl::_force_tls_local_dispatch_key_set(without_recorder(keys_));
}

Hidden::~Hidden() { c10::impl::_force_tls_local_dispatch_key_set(keys_); }

HiddenMessage::Announcement::Announcement() {
  if (auto* current = observer()) current->before_hidden_message();
}

at::Tensor again(const at::Tensor& tensor) {
  return observer() == nullptr || !tensor.defined() ? tensor : Again::apply(tensor);
}

TORCH_LIBRARY_FRAGMENT(tessera, library) { library.def("again(Tensor self) -> Tensor"); }
// Not for all backends at once: then distributed tensors would be copied before the operator came
// to their parts, and the mark would be lost.
TORCH_LIBRARY_IMPL(tessera, CPU, library) { library.impl("again", &copy); }
TORCH_LIBRARY_IMPL(tessera, CUDA, library) { library.impl("again", &copy); }
TORCH_LIBRARY_IMPL(tessera, Meta, library) { library.impl("again", &copy); }

}  // namespace tessera::capture
