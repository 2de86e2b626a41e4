#pragma once

#include <tessera/replicate/join.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera::detail::replicate {

/// Whether this thread is inside a Join: another rank may have run out, and take part in nothing
/// but the modules' own messages.
bool is_joining();

/// What a rank inside a Join does next.
enum class Step : int64_t {
  Finished,  // nothing of its own: it shadows the others
  Failed,    // an exception ended its training
  Forward,   // a synchronising forward: buffers are broadcast
  Bucket,    // sends a bucket
  Used,      // agrees on which parameters have a gradient on any rank
  Order,     // learns rank `first`'s order of gradients
};

struct JoinStep {
  Step step;
  size_t engine = 0;  // by its place in the Join
  size_t bucket = 0;
  bool operator==(const JoinStep&) const = default;
};

/// Who takes part in a step with something of its own.
struct Participants {
  int first = 0;      // the lowest such rank of the group
  double factor = 1;  // from the average over the group to the one asked for
};
/// Called before every collective of an engine inside a Join.
using Announce = std::function<Participants(Step step, size_t bucket)>;

/// Ranks tell each other what comes next before it comes, so that those without batches can follow
/// any order of forwards, backwards and engines, and a disagreement is an error on all ranks
/// instead of collectives that meet the wrong ones. Has a group of its own: buckets may be on their
/// way meanwhile.
class JoinCoordinator {
 public:
  JoinCoordinator(Group group, JoinOptions options, std::vector<std::string> engine_names);

  /// A rank with batches. Throws, on all ranks alike, if they disagree, one has failed, or one has
  /// run out and that is to be an error.
  Participants announce(const JoinStep& turn);
  /// A rank without: what the others do next. None: nobody has anything left.
  std::optional<JoinStep> listen();
  /// Tells the others that they need not wait for this rank, and does not wait for them.
  void leave() noexcept;

  /// Lowest rank with something of its own in the last step.
  int first() const { return first_; }
  /// Highest rank that had batches for longest.
  int last_to_finish() const { return last_to_finish_; }
  /// The ranks have thrown, or all have finished: nobody listens any more.
  bool is_over() const { return is_over_; }

 private:
  std::vector<JoinStep> exchange(const JoinStep& own);
  std::vector<JoinStep> call(const JoinStep& own);
  void check(const std::vector<JoinStep>& turns) const;
  std::string describe(const JoinStep& turn) const;

  Group group_;
  JoinOptions options_;
  std::vector<std::string> engine_names_;
  int first_ = 0;
  int last_to_finish_;
  bool is_over_ = false;
};

}  // namespace tessera::detail::replicate
