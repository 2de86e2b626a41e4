#pragma once

#include <tessera/comm.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::state {

/// The ranks that save or load together; one, if there is no world.
class CollectiveSection {
 public:
  /// Empty: the default group, or this process alone if there is none.
  explicit CollectiveSection(Group group);

  int rank() const { return group_ ? group_->getRank() : 0; }
  int size() const { return group_ ? group_->getSize() : 1; }
  const Group& group() const { return group_; }

  /// Runs this rank's share of the work; gives what it gave on every rank, or throws, on every
  /// rank, what it threw on one, with the number of that rank. So nobody waits for a rank that
  /// failed. Throws a ValueError, on every rank, unless all came here by the same function and, if
  /// given, with the same folder. Collective.
  std::vector<std::string> run(const std::string& function,
                               const std::function<std::string()>& work,
                               const std::string& folder = "") const;

 private:
  Group group_;
};

}  // namespace tessera::state
