#include "compiler/record/random.h"

#include "compiler/record/dispatch_key.h"
#include "compiler/record/memory.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <mutex>

namespace tessera::compiler {
namespace {

/// Of the CPU's generator. No operator sees it read or set.
at::Tensor random_state() {
  const RunScope unseen;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(const at::Tensor& state) {
  const RunScope unseen;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// What all who watch have in common: threads share the generator.
struct Mark {
  std::mutex mutex;
  int watchers = 0;
  uint64_t number = 0;
  uint64_t seed = 0;  // that it stands for
};

Mark& mark() {
  static auto& one = *new Mark;
  return one;
}

uint64_t kept_seed() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get<at::CPUGeneratorImpl>()->current_seed();
}

void keep_seed(uint64_t seed) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  auto* own = generator.get<at::CPUGeneratorImpl>();
  auto data = own->engine().data();
  data.seed_ = seed;
  at::mt19937 engine;
  engine.set_data(data);
  own->set_engine(engine);
}

}  // namespace

void GeneratorWatch::begin() {
  if (is_open_) return;
  is_open_ = true;
  auto& shared = mark();
  {
    const std::lock_guard lock(shared.mutex);
    if (shared.watchers++ == 0) {
      shared.seed = kept_seed();
      // Alike on ranks whose generators are: distributed operators compare the states.
      shared.number = shared.seed * 0x9E3779B97F4A7C15ULL + 0x7E55E7AULL;
    }
  }
  note();
}

void GeneratorWatch::end() {
  if (!is_open_) return;
  was_set_ = was_set();
  is_open_ = false;
  auto& shared = mark();
  const std::lock_guard lock(shared.mutex);
  if (--shared.watchers == 0 && kept_seed() == shared.number) keep_seed(shared.seed);
}

void GeneratorWatch::note() {
  if (!is_open_) return;
  if (was_set()) keep_seed(mark().number);
  known_ = random_state();
}

void GeneratorWatch::renew() {
  if (!is_open_ || was_set()) return;
  auto& shared = mark();
  const std::lock_guard lock(shared.mutex);
  shared.number = shared.number * 0xD1342543DE82EF95ULL + 1;
  keep_seed(shared.number);
}

bool GeneratorWatch::was_set() const { return is_open_ ? kept_seed() != mark().number : was_set_; }

GeneratorWatch::Before::Before(const GeneratorWatch& watch) : after_(random_state()) {
  set_random_state(watch.known_);
}

GeneratorWatch::Before::~Before() { set_random_state(after_); }

std::optional<std::vector<Argument>> Draws::drawn_before(const std::string& op) {
  const auto open =
      std::find_if(open_.rbegin(), open_.rend(), [](const Open& part) { return part.again; });
  if (open == open_.rend()) return std::nullopt;
  const auto& draws = known_[open->part];
  if (open->next >= draws.size() || draws[open->next].op != op)
    throw CannotRecord(op +
                       " draws random numbers in a checkpointed part that is computed again, "
                       "where its forward drew none that were recorded");
  return draws[open->next++].results;
}

void Draws::add(const std::string& op, const std::vector<Argument>& results) {
  for (const auto& part : open_) {
    if (!part.again) known_[part.part].push_back({op, results});
  }
}

}  // namespace tessera::compiler
