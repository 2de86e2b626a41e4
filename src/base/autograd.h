#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <memory>
#include <vector>

namespace tessera {

/// Owner of an autograd node: a shared_ptr up to libtorch 2.12, an intrusive_ptr since.
using NodePtr = decltype(torch::autograd::Edge::function);

template <class N, class... A>
NodePtr make_node(A&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<N>(std::forward<A>(arguments)...);
  else
    return c10::make_intrusive<N>(std::forward<A>(arguments)...);
}

/// Whether this thread runs a backward.
bool is_in_backward();

/// Backwards, one inside the other, whose ends somebody waits for. Not for several threads at once.
class BackwardCallbacks {
 public:
  /// When the backward that this thread runs ends, calls `end` with its number; asked again in the
  /// same backward, does nothing. If it fails, or `end` throws, `failed` is called before the
  /// caller of backward() sees the exception; what `failed` throws is lost.
  void expect(std::function<void(int backward)> end, std::function<void(int backward)> failed = {});
  /// Whether it was asked in the backward that this thread runs.
  bool is_expected() const;
  void close(int backward);
  void clear() { numbers_.clear(); }
  bool empty() const { return numbers_.empty(); }

 private:
  std::vector<int> numbers_;
};

}  // namespace tessera
