#include "train/agreed.h"

#include <tessera/comm.h>

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::train {

std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

void refuse_together(const std::string& problem) {
  const auto all = gather_bytes(problem);
  const auto first = std::ranges::find_if(all, [](const auto& text) { return !text.empty(); });
  if (first == all.end()) return;
  const bool is_everywhere = std::ranges::count(all, *first) == std::ssize(all);
  throw AgreedError(
      *first + (is_everywhere ? "" : " (on rank " + std::to_string(first - all.begin()) + ")"),
      kWrongSettings);
}

}  // namespace tessera::train
