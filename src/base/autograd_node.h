#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

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

}  // namespace tessera
