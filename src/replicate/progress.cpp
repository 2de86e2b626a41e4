#include "replicate/progress.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::replication {
namespace {

/// A count that rises with each.
int64_t writes_to(const std::vector<at::Tensor>& tensors) {
  int64_t writes = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.is_inference()) writes += tensor._version();
  }
  return writes;
}

}  // namespace

void Progress::add_forward(const std::shared_ptr<void>& graph) {
  notice_lost();
  if (graph)
    forwards_.push_back(graph);
  else
    has_unwatched_ = true;
}

bool Progress::may_bring_backward() const {
  return has_unwatched_ || std::any_of(forwards_.begin(), forwards_.end(),
                                       [](const auto& graph) { return !graph.expired(); });
}

void Progress::notice_lost() {
  if (std::erase_if(forwards_, [](const auto& graph) { return graph.expired(); }) > 0)
    has_lost_ = true;
}

std::optional<std::string> Progress::describe(const std::vector<at::Tensor>& parameters) {
  notice_lost();
  if (!writes_) return std::nullopt;
  return c10::str("since the last average ", has_lost_ ? "a" : "no",
                  " forward without backward, parameters ",
                  writes_to(parameters) == *writes_ ? "as before" : "updated");
}

void Progress::restart(const std::vector<at::Tensor>& parameters) {
  forwards_.clear();
  has_lost_ = has_unwatched_ = false;
  writes_ = writes_to(parameters);
}

void Progress::forget() { writes_.reset(); }

}  // namespace tessera::replication
