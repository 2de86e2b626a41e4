#pragma once

#include <tessera/compile/graph.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

/// Random numbers that a checkpointed part draws, and draws again from the same state of the
/// generator when it is recomputed. A program keeps them from the first time.
class Draws {
 public:
  void begin(const void* part, bool again) {
    if (!again) known_[part].clear();
    open_.push_back({part, again, 0});
  }
  void end() { open_.pop_back(); }
  bool is_open() const { return !open_.empty(); }
  /// Whether the innermost part is one that is recomputed.
  bool is_again() const { return !open_.empty() && open_.back().again; }

  /// What a node of this operator has drawn before, if the innermost part that is recomputed has
  /// come to it again. Throws CannotRecord if it drew something else.
  std::optional<std::vector<Argument>> drawn_before(const std::string& op);
  /// A draw, or one made again, for the parts around it to repeat.
  void add(const std::string& op, const std::vector<Argument>& results);

 private:
  struct Draw {
    std::string op;
    std::vector<Argument> results;
  };
  struct Open {
    const void* part;
    bool again;
    size_t next;
  };
  std::map<const void*, std::vector<Draw>> known_;
  std::vector<Open> open_;
};

}  // namespace tessera::compiler
