#pragma once

#include <tessera/parallel/styles.h>

#include <concepts>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// A style, shared by the entries that use it. Made from any style.
class StylePtr : public std::shared_ptr<const ParallelStyle> {
 public:
  using std::shared_ptr<const ParallelStyle>::shared_ptr;
  template <std::derived_from<ParallelStyle> Style>
  StylePtr(Style style)  // NOLINT(google-explicit-constructor): plans read as lists
      : std::shared_ptr<const ParallelStyle>(std::make_shared<const Style>(std::move(style))) {}
};

struct PlanEntry {
  /// Names of submodules, one component after the other, as "blocks.*.net[12]": `*`, `?`, `[a-c]`
  /// and `[!a-c]` within a component, which must match the whole name of a child; `*` does not
  /// cross a dot. "" is the module itself.
  std::string pattern;
  StylePtr style;
};

/// What parallelize_module does: one style for the module itself, or entries, which are applied in
/// order, each to every submodule that it names. An entry that names none is a warning.
class ParallelPlan {
 public:
  ParallelPlan() = default;                 // none
  ParallelPlan(std::nullptr_t /*none*/) {}  // NOLINT(google-explicit-constructor)
  template <std::derived_from<ParallelStyle> Style>
  ParallelPlan(Style style)  // NOLINT(google-explicit-constructor)
      : entries_{{"", std::move(style)}} {}
  ParallelPlan(std::initializer_list<PlanEntry> entries) : entries_(entries) {}
  ParallelPlan(std::vector<PlanEntry> entries)  // NOLINT(google-explicit-constructor)
      : entries_(std::move(entries)) {}

  const std::vector<PlanEntry>& entries() const { return entries_; }

 private:
  std::vector<PlanEntry> entries_;
};

}  // namespace tessera
