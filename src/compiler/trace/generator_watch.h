#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::compiler {

/// Tells whether the CPU's random generator is as its user knows it, or somebody has set it
/// (torch::manual_seed), which no operator shows.
class GeneratorWatch {
 public:
  /// As it is now, it is known.
  void note();
  bool was_set() const;

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
};

}  // namespace tessera::compiler
