#pragma once

#include "compiler/programs/agreement.h"

#include <algorithm>
#include <functional>
#include <list>
#include <string>
#include <vector>

namespace tessera::compiler {

/// What became of some code that was to be programs, for explain(); and why it runs eagerly.
class Reasons {
 public:
  /// `caller` and `subject`: who speaks, in messages, and of what. `fullgraph`: that it runs
  /// eagerly is an error.
  Reasons(std::string caller, std::string subject, bool fullgraph)
      : caller_(std::move(caller)), subject_(std::move(subject)), fullgraph_(fullgraph) {}

  void note(std::string line) { lines_.push_back(std::move(line)); }
  void note_once(const std::string& line);
  /// From now on it runs eagerly, since `why`.
  void fall_back(const std::string& why);
  /// Empty if it needn't run eagerly.
  const std::string& why_eager() const { return why_eager_; }
  /// Throws if it runs eagerly and must not.
  void require_program() const;
  std::string text() const;

 private:
  const std::string caller_, subject_;
  const bool fullgraph_;
  std::vector<std::string> lines_;
  std::string why_eager_;
};

/// The programs that were made of some code: a step, the forward of a module, backwards. Which of
/// them serves a call, who has them finds out; `last_use` of a program is the cache's, is_shared()
/// says whether all ranks have it.
template <class P>
class ProgramCache {
 public:
  /// Keeps `most` programs that all ranks have, and as many of this rank's own, so that ranks drop
  /// the same ones of the former.
  ProgramCache(Reasons given, size_t most) : reasons(std::move(given)), most_(most) {}

  Reasons reasons;
  Agreement agreement;

  auto begin() { return programs_.begin(); }
  auto end() { return programs_.end(); }
  auto begin() const { return programs_.begin(); }
  auto end() const { return programs_.end(); }
  bool empty() const { return programs_.empty(); }
  size_t size() const { return programs_.size(); }
  bool is_full(bool of_shared) const { return count(of_shared) >= most_; }

  P& add(P program) {
    programs_.push_back(std::move(program));
    use(programs_.back());
    return programs_.back();
  }
  void use(P& program) { program.last_use = ++clock_; }
  /// The first for which `is_it` holds; null if there is none.
  template <class F>
  P* find(F is_it) {
    const auto found = std::ranges::find_if(programs_, is_it);
    return found == programs_.end() ? nullptr : &*found;
  }
  /// Of those for which `is_it` holds the one that was used last; null if there is none.
  template <class F>
  const P* latest(F is_it) const {
    const P* found = nullptr;
    for (const auto& program : programs_) {
      if (std::invoke(is_it, program) && (found == nullptr || program.last_use > found->last_use))
        found = &program;
    }
    return found;
  }
  template <class F>
  void drop_if(F is_it) {
    programs_.remove_if(is_it);
  }
  /// The least recently used ones go, down to as many as are kept. How many did.
  int drop_oldest(bool of_shared) {
    int dropped = 0;
    for (size_t kept = count(of_shared); kept > most_; --kept, ++dropped) {
      note_dropped(kept);
      programs_.erase(std::ranges::min_element(programs_, {}, [&](const P& program) {
        return std::pair(program.is_shared() != of_shared, program.last_use);
      }));
    }
    return dropped;
  }

  enum class Agreed { Yes, NotAll, DifferentMessages };
  /// Note [ranks agree]: a program runs if all ranks made theirs of this call, with the same
  /// messages. Collective. `messages`: of the one that was made here, 0 if none was.
  Agreed agree_on(int64_t messages) const {
    const auto all = agreement.exchange(messages);
    if (all.is_one()) return Agreed::Yes;
    return all.least > 0 ? Agreed::DifferentMessages : Agreed::NotAll;
  }

 private:
  size_t count(bool of_shared) const {
    return static_cast<size_t>(std::ranges::count(programs_, of_shared, &P::is_shared));
  }
  void note_dropped(size_t of);

  const size_t most_;
  std::list<P> programs_;
  uint64_t clock_ = 0;  // counts uses of programs
};

constexpr const char* kDifferentMessages = "ranks made programs of it that send different messages";

/// counters(), and a line.
void note_dropped(Reasons& reasons, size_t of);

template <class P>
void ProgramCache<P>::note_dropped(size_t of) {
  compiler::note_dropped(reasons, of);
}

}  // namespace tessera::compiler
