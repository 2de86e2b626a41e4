#include "state/collective_section.h"

#include "base/text.h"
#include "comm/call_check.h"

#include <c10/util/Exception.h>

#include <filesystem>

namespace tessera::state {
namespace {

// The first character of what ranks tell each other.
constexpr char kDone = '+';
constexpr char kValueError = 'v';
constexpr char kNotImplementedError = 'n';
constexpr char kOtherError = 'e';
constexpr char kEnd = '\0';  // of what names the call, before it; no path has that character

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
               also.empty() ? "" : c10::str(" (and an error on ", format_ranks(also), ")"));
  TORCH_CHECK_VALUE(outcome[0] != kValueError, message);
  TORCH_CHECK_NOT_IMPLEMENTED(outcome[0] != kNotImplementedError, message);
  TORCH_CHECK(false, message);
}

/// A folder as this host knows it: its path, and where the links in that lead. On a shared file
/// system either may differ between hosts.
struct FolderName {
  std::string path;
  std::string real;

  static FolderName of(const std::string& folder) {
    if (folder.empty()) return {};
    std::error_code error;
    const auto path = std::filesystem::absolute(folder, error).lexically_normal();
    const auto real = std::filesystem::weakly_canonical(path, error);
    return {plain(path), plain(error ? path : real)};
  }
  bool is_same(const FolderName& other) const { return path == other.path || real == other.real; }

 private:
  static std::string plain(const std::filesystem::path& path) {
    return path.has_filename() ? path.string() : path.parent_path().string();
  }
};

std::string take_word(std::string& text) {
  const auto end = text.find(kEnd);
  auto word = text.substr(0, end);
  text.erase(0, end == std::string::npos ? end : end + 1);
  return word;
}

/// Takes what names the call from all outcomes.
void check_same_call(const std::string& function, std::vector<std::string>& all) {
  std::string first_function;
  FolderName first_folder;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto its_function = take_word(all[rank]);
    const auto path = take_word(all[rank]);
    const FolderName folder{path, take_word(all[rank])};
    if (rank == 0) {
      first_function = its_function;
      first_folder = folder;
    }
    const auto call_of = [](const std::string& called, const FolderName& with) {
      return with.path.empty() ? called : called + "(\"" + with.path + "\")";
    };
    TORCH_CHECK_VALUE(its_function == first_function, function,
                      ": expected all ranks to call the same function, but rank 0 calls ",
                      call_of(first_function, first_folder), " and rank ", rank, " calls ",
                      call_of(its_function, folder), "; nothing was loaded or saved");
    TORCH_CHECK_VALUE(folder.is_same(first_folder), function,
                      ": expected the same folder on all ranks, got ", first_folder.path,
                      " on rank 0 and ", folder.path, " on rank ", rank,
                      "; make the path from what all ranks share, such as the step");
  }
}

}  // namespace

CollectiveSection::CollectiveSection(Group group)
    : group_(group              ? std::move(group)
             : is_initialized() ? default_group()
                                : Group()) {}

std::vector<std::string> CollectiveSection::run(const std::string& function,
                                                const std::function<std::string()>& work,
                                                const std::string& folder) const {
  const auto name = FolderName::of(folder);
  const auto own =
      function + kEnd + name.path + kEnd + name.real + kEnd + outcome_of(function, work);
  const comm::Bookkeeping bookkeeping("save or load");  // one name: check_same_call tells more
  auto all = size() > 1 ? gather_bytes(own, group_) : std::vector<std::string>{own};
  check_same_call(function, all);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank][0] != kDone)
      throw_outcome(function, all, rank, all.size() == 1);
  }
  for (auto& outcome : all) outcome.erase(0, 1);
  return all;
}

}  // namespace tessera::state
