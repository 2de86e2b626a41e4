#include "base/open_backwards.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace tessera {

bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

void OpenBackwards::expect(std::function<void(int)> end) {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (std::find(numbers_.begin(), numbers_.end(), backward) != numbers_.end()) return;
  numbers_.push_back(backward);
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end = std::move(end), backward] { end(backward); });
}

void OpenBackwards::close(int backward) { std::erase(numbers_, backward); }

}  // namespace tessera
