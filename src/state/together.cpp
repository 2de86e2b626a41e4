#include "state/together.h"

#include "base/text.h"

#include <c10/util/Exception.h>

namespace tessera::state {
namespace {

// The first character of what ranks tell each other.
constexpr char kDone = '+';
constexpr char kValueError = 'v';
constexpr char kNotImplementedError = 'n';
constexpr char kOtherError = 'e';

std::string message_without(const std::string& function, const std::string& message) {
  const auto prefix = function + ": ";
  return message.starts_with(prefix) ? message.substr(prefix.size()) : message;
}

std::string outcome_of(const std::string& function, const std::function<std::string()>& work) {
  try {
    return kDone + work();
  } catch (const c10::ValueError& error) {
    return kValueError + message_without(function, error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    return kNotImplementedError + message_without(function, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return kOtherError + message_without(function, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return kOtherError + message_without(function, error.what());
  }
}

[[noreturn]] void throw_outcome(const std::string& function, const std::vector<std::string>& all,
                                size_t first, bool is_alone) {
  std::vector<int> also;
  for (size_t rank = first + 1; rank < all.size(); ++rank) {
    if (all[rank][0] != kDone) also.push_back(static_cast<int>(rank));
  }
  const auto& outcome = all[first];
  const auto message =
      c10::str(function, ": ", is_alone ? "" : c10::str("rank ", first, ": "), outcome.substr(1),
               also.empty() ? "" : c10::str(" (and an error on ranks ", format_list(also), ")"));
  TORCH_CHECK_VALUE(outcome[0] != kValueError, message);
  TORCH_CHECK_NOT_IMPLEMENTED(outcome[0] != kNotImplementedError, message);
  TORCH_CHECK(false, message);
}

}  // namespace

Together::Together(Group group)
    : group_(group              ? std::move(group)
             : is_initialized() ? default_group()
                                : Group()) {}

std::vector<std::string> Together::run(const std::string& function,
                                       const std::function<std::string()>& work) const {
  const auto own = outcome_of(function, work);
  auto all = size() > 1 ? gather_bytes(own, group_) : std::vector<std::string>{own};
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank][0] != kDone)
      throw_outcome(function, all, rank, all.size() == 1);
  }
  for (auto& outcome : all) outcome.erase(0, 1);
  return all;
}

}  // namespace tessera::state
