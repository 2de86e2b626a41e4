#include "replicate/progress.h"

#include "dtensor/part.h"

#include <c10/util/StringUtil.h>

namespace tessera::detail::replicate {
namespace {

constexpr int64_t kValuesOfATensor = 4;

/// Appends a few values as they lie in memory, if the host can read them without waiting.
void add_values(std::vector<char>& to, const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.numel() == 0) return;
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  const auto* values = static_cast<const char*>(tensor.const_data_ptr());
  const int64_t readable = tensor.is_non_overlapping_and_dense() ? tensor.numel() : 1;
  for (int64_t i = 0; i < kValuesOfATensor; ++i) {
    const auto* value = values + readable * i / kValuesOfATensor * bytes;
    to.insert(to.end(), value, value + bytes);
  }
}

Progress::Mark mark_of(const std::vector<at::Tensor>& parameters) {
  Progress::Mark mark{.writes = 0, .a_few = {}};
  for (const auto& parameter : parameters) {
    if (!parameter.is_inference()) mark.writes += parameter._version();
    add_values(mark.a_few, dtensor::local_part(parameter));
  }
  return mark;
}

}  // namespace

void Progress::add_forward(const std::weak_ptr<void>& graph) {
  notice_lost();
  forwards_.push_back(graph);
}

void Progress::notice_lost() {
  if (std::erase_if(forwards_, [](const auto& graph) { return graph.expired(); }) > 0)
    has_lost_ = true;
}

std::optional<std::string> Progress::describe(const std::vector<at::Tensor>& parameters) {
  notice_lost();
  if (!mark_) return std::nullopt;
  return c10::str("since the last average ", has_lost_ ? "a" : "no",
                  " forward without backward, parameters ",
                  mark_of(parameters) == *mark_ ? "as before" : "updated");
}

void Progress::restart(const std::vector<at::Tensor>& parameters) {
  forget();
  mark_ = mark_of(parameters);
}

void Progress::forget() {
  forwards_.clear();
  has_lost_ = false;
  mark_.reset();
}

}  // namespace tessera::detail::replicate
