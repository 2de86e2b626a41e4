#pragma once

#include <tessera/compile/graph.h>

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

/// Tells whether somebody has set the CPU's random generator (torch::manual_seed), which no
/// operator shows. While anyone watches, what the generator keeps as its seed, on which no number
/// depends, is a mark: drawing leaves it alone, whoever draws, and setting replaces it.
class GeneratorWatch {
 public:
  GeneratorWatch() = default;
  ~GeneratorWatch() { end(); }
  GeneratorWatch(const GeneratorWatch&) = delete;
  GeneratorWatch& operator=(const GeneratorWatch&) = delete;

  void begin();
  /// Its seed is put back. was_set() stays what it is.
  void end();
  /// As it is now, it is known.
  void note();
  bool was_set() const;
  /// Somebody draws: a state from before, which has the mark of then, is known as such if it is
  /// set.
  void renew();

  /// While it lives, the generator is as it was when it was noted last.
  class Before {
   public:
    explicit Before(const GeneratorWatch& watch);
    ~Before();
    Before(const Before&) = delete;
    Before& operator=(const Before&) = delete;

   private:
    at::Tensor after_;
  };

 private:
  at::Tensor known_;
  bool is_open_ = false;
  bool was_set_ = false;  // when it ended
};

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
