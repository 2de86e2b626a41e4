#pragma once

#include <tessera/compile/graph.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

/// One number of each rank of a group, compared without a wait of the host.
class ProgramCheck {
 public:
  /// By tensors on the device.
  ProgramCheck(std::string group, c10::Device device) : group_(std::move(group)), device_(device) {}

  /// Collective. Throws a ValueError if the ranks' numbers of an earlier call differed; with `now`,
  /// or by tensors on the CPU, of this one.
  void compare(int64_t mine, bool now);

 private:
  struct Comparison {
    int64_t mine;
    at::Tensor told;  // on the host: the least, and the negated greatest
    std::optional<c10::Event> copied = std::nullopt;  // when it is there; none: it is
  };
  void read(bool all);
  void check(const Comparison& comparison) const;

  std::string group_;
  c10::Device device_;
  std::deque<Comparison> pending_;  // in the order of calls; the host may be some of them ahead
};

/// What ranks tell each other of their programs. Note [ranks agree]: a program sends fewer and
/// larger messages than the function it was made of. So all ranks that talk to each other run
/// programs, with the same messages, or none does. They agree when a program is made. Afterwards
/// nobody waits for that: the collectives of a run say of which program they are
/// (comm::ProgramScope), and a rank whose call no program serves, so that it runs eagerly, makes an
/// error on all ranks at the first of them. Backends that compare nothing before data moves are
/// told apart: see announce().
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

  /// At each call, before anything is sent, in groups whose backends compare no calls: which
  /// program runs; 0: none. The host does not wait. What others said is read at a later call, and
  /// at once if this rank runs none, or with `now`; a ValueError if it was something else.
  void announce(int64_t program, bool now = false);

 private:
  std::vector<std::string> groups_;
  std::deque<ProgramCheck> checks_;  // by group that needs it
};

/// Names the messages that a program sends: kind, sizes and group of each, in order. Above 0.
int64_t signature_of(const Graph& graph);
/// The same without sizes, in which ranks may differ.
int64_t signature_without_sizes(const Graph& graph);
/// The groups in which it sends them.
std::vector<std::string> groups_of(const Graph& graph);

}  // namespace tessera::compiler
