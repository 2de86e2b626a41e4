#pragma once

#include <ATen/core/Tensor.h>

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

}  // namespace tessera::compiler
