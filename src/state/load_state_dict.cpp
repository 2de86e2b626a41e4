#include <tessera/dtensor.h>
#include <tessera/state_dict.h>

#include "state/entries.h"
#include "state/placed.h"
#include "state/presentation.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <sstream>
#include <unordered_set>

namespace tessera {
namespace {

using state::Entry;
using state::Presentation;

/// What a dict has for a tensor of the module; null if nothing.
const at::Tensor* find(const StateDict& dict, const Entry& entry) {
  const auto* given = dict.find(entry.name);
  return given != nullptr && given->defined() ? given : nullptr;
}

std::vector<int64_t> expected_sizes(const Presentation& presentation, const Entry& entry,
                                    const at::Tensor& given) {
  return is_dtensor(given) ? entry.tensor.sizes().vec() : presentation.plain_sizes(entry.tensor);
}

LoadReport compare(const std::vector<Entry>& own, const Presentation& presentation,
                   const StateDict& dict) {
  LoadReport report;
  std::unordered_set<std::string> names;
  for (const auto& entry : own) {
    names.insert(entry.name);
    const auto* given = find(dict, entry);
    if (given == nullptr) {
      report.missing.push_back(entry.name);
      continue;
    }
    auto expected = expected_sizes(presentation, entry, *given);
    if (given->sizes() != expected)
      report.mismatched.push_back({entry.name, std::move(expected), given->sizes().vec()});
  }
  for (const auto& [name, tensor] : dict) {
    if (!names.count(name)) report.unexpected.push_back(name);
  }
  return report;
}

std::string list(const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = std::string("; ") + title + ": ";
  for (size_t i = 0; i < names.size(); ++i) text += (i ? ", " : "") + names[i];
  return text;
}

std::string describe(const LoadReport& report) {
  std::vector<std::string> shapes;
  for (const auto& mismatch : report.mismatched) {
    std::ostringstream text;
    text << mismatch.name << " (expected " << c10::IntArrayRef(mismatch.expected) << ", got "
         << c10::IntArrayRef(mismatch.got) << ")";
    shapes.push_back(text.str());
  }
  return list("missing", report.missing) + list("unexpected", report.unexpected) +
         list("of another shape", shapes);
}

}  // namespace

LoadReport load_state_dict(nn::ModuleRef module, const StateDict& dict, LoadOptions options) {
  constexpr const char* kCaller = "load_state_dict";
  const Presentation presentation(*module, Presentation::Of::Parameters, kCaller);
  const auto own = state::entries_of(*module);
  auto report = compare(own, presentation, dict);
  TORCH_CHECK(!options.strict || report.empty(),
              "load_state_dict: expected the names and shapes of ", module->name(),
              describe(report),
              dict.empty() ? "; the dict is empty on this rank: one made with rank0_only has its "
                             "values on rank 0 alone, and every rank needs them to load"
                           : "",
              "; nothing was loaded; correct the dict, or load what fits with {.strict = false}");
  const auto fits = [&](const Entry& entry, const at::Tensor* given) {
    return given && given->sizes() == expected_sizes(presentation, entry, *given);
  };
  for (const auto& entry : own) {
    const auto* given = find(dict, entry);
    if (!fits(entry, given)) continue;
    state::check_mesh(kCaller, entry.name, entry.tensor, *given);
    state::check_packed(kCaller, entry.name, entry.tensor, *given,
                        presentation.is_local(entry.tensor));
  }
  const c10::AutoGradMode no_grad(false);
  for (const auto& entry : own) {
    const auto* given = find(dict, entry);
    if (!fits(entry, given)) continue;
    // The very tensor, not an alias: writes to it may have to wait for other ranks.
    entry.tensor.copy_(
        state::placed_like(entry.tensor, *given, presentation.is_local(entry.tensor)));
  }
  return report;
}

}  // namespace tessera
