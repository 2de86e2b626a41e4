#pragma once

#include "nn/composable.h"

/// Which positions of a sequence a module's input has, where a rank has a part of the sequence.
namespace tessera::nn {

/// Kept with modules that count positions, under kPositions.
class Positions : public ComposableState {
 public:
  /// Of `length` elements, one after the other; int64. `largest`: how many positions the module
  /// has; an error, which names it as `module`, where those of the whole sequence are more.
  virtual at::Tensor of(int64_t length, c10::Device device, int64_t largest,
                        const char* module) const = 0;
};

inline constexpr const char* kPositions = "ContextParallel";

/// The module's; null if it has the whole sequence.
inline std::shared_ptr<const Positions> find_positions(const torch::nn::Module& module) {
  return std::dynamic_pointer_cast<const Positions>(find_state(module, kPositions));
}

}  // namespace tessera::nn
