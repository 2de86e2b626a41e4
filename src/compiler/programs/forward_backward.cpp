#include <tessera/compile/backward.h>
#include <tessera/compile/config.h>
#include <tessera/compile/module.h>

#include "checkpoint/engine.h"
#include "compiler/programs/pipeline.h"
#include "compiler/programs/region.h"
#include "compiler/runtime/listing.h"
#include "compiler/runtime/roofline.h"

#include <c10/util/Exception.h>

#include <list>

namespace tessera::detail {

struct CompiledForward::Impl {
  Impl(torch::nn::Module& compiled, CompileOptions given)
      : module(compiled), options(compiler::of_part(std::move(given))) {}

  torch::nn::Module& module;
  const CompileOptions options;
  Graph graph;                            // of the last program
  std::vector<compiler::Launch> kernels;  // of it, by node
  std::unique_ptr<compiler::Region> region;

  Executable make(Graph graph) {
    auto prepared = compiler::prepare(std::move(graph), options);
    this->graph = prepared.graph;
    kernels = prepared.kernels;
    return make_executable(std::move(prepared));
  }
};

CompiledForward::CompiledForward(torch::nn::Module& module, CompileOptions options)
    : impl_(std::make_unique<Impl>(module, std::move(options))) {
  const auto& own = impl_->options;
  TORCH_CHECK_VALUE(!own.parallel_mode && !own.module && !own.optimizer && !own.memory_budget,
                    "compile(module): expected no parallel_mode, module, optimizer or "
                    "memory_budget, which belong to compile(function) over a whole step");
  compiler::check_options(own);
  impl_->region = std::make_unique<compiler::Region>(compiler::Region::Options{
      .caller = "compile(" + module.name() + ")",
      .subject = "its forward",
      .compiler = [impl = impl_.get()](Graph graph) { return impl->make(std::move(graph)); },
      .fullgraph = own.fullgraph,
      .max_programs = own.max_programs});
}

CompiledForward::~CompiledForward() = default;

void CompiledForward::run(c10::function_ref<void()> forward) {
  const auto& mode = compile_config().optimize_ddp;
  if (mode == "python_reducer_without_compiled_forward") return forward();
  const compiler::OverrideScope overrides(impl_->options.module_override, {&impl_->module});
  impl_->region->run(forward);
}

std::string CompiledForward::explain(const ExplainOptions& options) const {
  auto text = impl_->region->explain();
  if (options.time_kernels)
    text += compiler::roofline_text(compiler::time_kernels(impl_->graph, impl_->kernels));
  return text;
}
std::string CompiledForward::generated_code() const {
  return impl_->graph.nodes.empty() ? "" : compiler::program_text(impl_->graph);
}
std::string CompiledForward::program_graph() const {
  return impl_->graph.nodes.empty() ? "" : impl_->graph.str();
}

}  // namespace tessera::detail

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
/// scope, but not from world to world: programs are made for the backend of their groups.
std::shared_ptr<Region> shared_region(Executable (*compiler)(Graph)) {
  struct Kept {
    Executable (*compiler)(Graph);
    CompileConfig config;
    std::shared_ptr<Region> region;
  };
  thread_local std::list<Kept> kept;
  thread_local c10::weak_intrusive_ptr<c10d::ProcessGroup> kept_world{Group()};
  const auto world = is_initialized() ? default_group() : Group();
  if (kept_world.lock() != world) {
    kept.clear();
    kept_world = c10::weak_intrusive_ptr<c10d::ProcessGroup>(world);
  }
  for (const auto& each : kept) {
    if (each.compiler == compiler && each.config == compile_config()) return each.region;
  }
  kept.push_back({compiler, compile_config(), make_region(compiler)});
  return kept.back().region;
}

}  // namespace

struct CompiledBackward::Impl final : detail::checkpoint::BackwardRunner {
  std::shared_ptr<Region> region;
  std::unique_ptr<detail::checkpoint::RunnerScope> scope;

  void run(c10::function_ref<void()> backward) override { region->run(backward); }
};

CompiledBackward::CompiledBackward(GraphCompiler compiler) : impl_(std::make_unique<Impl>()) {
  detail::checkpoint::install_engine();
  if (const auto* known = compiler.target<Executable (*)(Graph)>())
    impl_->region = shared_region(*known);
  else
    impl_->region = make_region(std::move(compiler));
  impl_->scope = std::make_unique<detail::checkpoint::RunnerScope>(impl_.get());
}

CompiledBackward::~CompiledBackward() = default;

std::string CompiledBackward::explain() const { return impl_->region->explain(); }

}  // namespace tessera
