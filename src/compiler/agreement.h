#pragma once

#include <tessera/compile/graph.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::compiler {

/// What ranks tell each other before a program runs. Note [ranks agree]: a program sends fewer and
/// larger messages than the function it was made of. So all ranks that talk to each other run
/// programs, with the same messages, or none does; a rank whose batch has other sizes would
/// otherwise wait for messages that nobody sends.
class Agreement {
 public:
  /// The function communicates in these groups, by name; the same on all their ranks.
  void meet(const std::vector<std::string>& groups);

  struct Range {
    int64_t least, most;
    bool is_one() const { return least == most; }
  };
  /// Of all ranks that are reached through the groups. Collective; without groups it is this rank's
  /// alone.
  Range exchange(int64_t mine) const;

 private:
  std::vector<std::string> groups_;
};

/// Names the messages that a program sends: kind, sizes and group of each, in order. Above 0.
int64_t signature_of(const Graph& graph);
/// The groups in which it sends them.
std::vector<std::string> groups_of(const Graph& graph);

}  // namespace tessera::compiler
