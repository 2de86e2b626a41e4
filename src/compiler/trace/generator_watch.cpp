#include "compiler/trace/generator_watch.h"

#include "compiler/trace/random_state.h"

#include <cstring>

namespace tessera::compiler {

void GeneratorWatch::note() { known_ = random_state(); }

bool GeneratorWatch::was_set() const {
  if (!known_.defined()) return false;
  const auto present = random_state();
  return present.nbytes() != known_.nbytes() ||
         std::memcmp(present.const_data_ptr(), known_.const_data_ptr(), known_.nbytes()) != 0;
}

GeneratorWatch::Before::Before(const GeneratorWatch& watch) : after_(random_state()) {
  set_random_state(watch.known_);
}

GeneratorWatch::Before::~Before() { set_random_state(after_); }

}  // namespace tessera::compiler
