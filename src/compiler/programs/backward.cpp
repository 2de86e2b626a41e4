#include <tessera/compile/backward.h>
#include <tessera/compile/config.h>

#include "checkpoint/engine.h"
#include "compiler/programs/region.h"

#include <list>

namespace tessera {
namespace {

using compiler::Region;

/// A training script has some kinds of backward; one that has very many is not worth a program
/// each.
constexpr size_t kMostKinds = 64;

std::shared_ptr<Region> make_region(GraphCompiler compiler) {
  return std::make_shared<Region>(Region::Options{.caller = "CompiledBackward",
                                                  .subject = "backward",
                                                  .compiler = std::move(compiler),
                                                  .max_programs = kMostKinds,
                                                  .tries_again = true});
}

/// What backwards of this thread have been, by compiler and configuration; kept from scope to
/// scope.
std::shared_ptr<Region> shared_region(Executable (*compiler)(Graph)) {
  struct Kept {
    Executable (*compiler)(Graph);
    CompileConfig config;
    std::shared_ptr<Region> region;
  };
  thread_local std::list<Kept> kept;
  for (const auto& each : kept) {
    if (each.compiler == compiler && each.config == compile_config()) return each.region;
  }
  kept.push_back({compiler, compile_config(), make_region(compiler)});
  return kept.back().region;
}

}  // namespace

struct CompiledBackward::Impl final : recompute::BackwardRunner {
  std::shared_ptr<Region> region;
  std::unique_ptr<recompute::RunnerScope> scope;

  void run(c10::function_ref<void()> backward) override { region->run(backward); }
};

CompiledBackward::CompiledBackward(GraphCompiler compiler) : impl_(std::make_unique<Impl>()) {
  recompute::require_engine("CompiledBackward");
  if (const auto* known = compiler.target<Executable (*)(Graph)>())
    impl_->region = shared_region(*known);
  else
    impl_->region = make_region(std::move(compiler));
  impl_->scope = std::make_unique<recompute::RunnerScope>(impl_.get());
}

CompiledBackward::~CompiledBackward() = default;

std::string CompiledBackward::explain() const { return impl_->region->explain(); }

}  // namespace tessera
