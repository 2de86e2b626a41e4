#include <tessera/compile/config.h>
#include <tessera/compile/module.h>

#include "compiler/programs/overrides.h"
#include "compiler/programs/pipeline.h"
#include "compiler/programs/region.h"
#include "compiler/runtime/listing.h"
#include "compiler/runtime/roofline.h"

#include <c10/util/Exception.h>

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
