#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::compiler {

/// Tells whether somebody has set the CPU's random generator (torch::manual_seed), which no
/// operator shows. Other threads may have drawn from it.
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
