#include "base/autograd.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace tessera {
namespace {

/// Lives with the backward, which drops it when it fails.
class Ending {
 public:
  Ending(int backward, std::function<void(int)> end, std::function<void(int)> failed)
      : backward_(backward), end_(std::move(end)), failed_(std::move(failed)) {}
  ~Ending() {
    if (!failed_) return;
    try {
      failed_(backward_);
    } catch (...) {
      // The exception that ended the backward is on its way.
    }
  }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

  void end() {
    end_(backward_);
    failed_ = nullptr;
  }

 private:
  int backward_;
  std::function<void(int)> end_;
  std::function<void(int)> failed_;
};

}  // namespace

bool is_in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

bool BackwardCallbacks::is_expected() const {
  const int backward = torch::autograd::get_current_graph_task_id();
  return std::find(numbers_.begin(), numbers_.end(), backward) != numbers_.end();
}

void BackwardCallbacks::expect(std::function<void(int)> end, std::function<void(int)> failed) {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (is_expected()) return;
  numbers_.push_back(backward);
  torch::autograd::Engine::get_default_engine().queue_callback(
      [ending = std::make_shared<Ending>(backward, std::move(end), std::move(failed))] {
        ending->end();
      });
}

void BackwardCallbacks::close(int backward) { std::erase(numbers_, backward); }

}  // namespace tessera
