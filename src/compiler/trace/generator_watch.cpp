#include "compiler/trace/generator_watch.h"

#include "compiler/trace/key.h"
#include "compiler/trace/random_state.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>

namespace tessera::compiler {
namespace {

at::mt19937_data_pod engine_of(const at::Tensor& state) {
  const RunScope unseen;
  auto generator = at::detail::createCPUGenerator();
  generator.set_state(state);
  return generator.get<at::CPUGeneratorImpl>()->engine().data();
}

/// Whether drawing from the first leads to the second, within what a thread may draw meanwhile.
bool follows(const at::mt19937_data_pod& first, const at::mt19937_data_pod& second) {
  constexpr int kMostBlocks = 30'000;  // of 624 numbers, which are made together
  if (first.seed_ != second.seed_) return false;
  at::mt19937 engine;
  engine.set_data(first);
  for (int i = 0; i < kMostBlocks; ++i) {
    const auto at = engine.data();
    if (at.state_ == second.state_) return at.left_ >= second.left_;
    for (int left = at.left_; left > 0; --left) engine();
  }
  return false;
}

}  // namespace

void GeneratorWatch::note() { known_ = random_state(); }

bool GeneratorWatch::was_set() const {
  if (!known_.defined()) return false;
  const auto present = random_state();
  const bool is_same =
      present.nbytes() == known_.nbytes() &&
      std::memcmp(present.const_data_ptr(), known_.const_data_ptr(), known_.nbytes()) == 0;
  return !is_same && !follows(engine_of(known_), engine_of(present));
}

GeneratorWatch::Before::Before(const GeneratorWatch& watch) : after_(random_state()) {
  set_random_state(watch.known_);
}

GeneratorWatch::Before::~Before() { set_random_state(after_); }

}  // namespace tessera::compiler
