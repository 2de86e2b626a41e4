#include "compiler/programs/pipeline.h"

#include <tessera/compile/config.h>

#include "base/text.h"
#include "compiler/ir/operators.h"
#include "compiler/kernels/buffers.h"
#include "compiler/passes/passes.h"
#include "compiler/programs/agreement.h"
#include "compiler/runtime/listing.h"
#include "compiler/runtime/program.h"
#include "nn/module_hooks.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

namespace tessera {
namespace compiler {
namespace {

/// Where sources go while somebody collects them.
thread_local std::vector<std::string>* collected = nullptr;

bool fuses(const CompileOptions& options) {
  return options.backend == CompileBackend::Codegen &&
         std::ranges::find(options.disabled_passes, "fuse") == options.disabled_passes.end();
}

/// The list; what passes demand of it is said where they are, in passes/passes.cpp.
std::vector<Pass> passes_for(const CompileOptions& options, const std::vector<Pass>& further) {
  const auto& config = compile_config();
  auto passes = transformations(options);
  const auto add = [&](const std::string& name) {
    passes.push_back(find_pass(name, config.bucket_bytes));
  };
  for (const char* name : {"skip_overwritten", "remove_dead_code", "fold_constants", "merge_equal",
                           "drop_recompute_marks"})
    add(name);
  if (config.reorder_for_locality) add("launch_early");
  if (options.compress_gradients)
    add(options.compress_gradients == at::kHalf ? "compress_to_float16" : "compress_to_bfloat16");
  add("bucket_reduce_scatters");
  add("bucket_all_gathers");
  for (const auto& name : config.fuse_ddp_passes) add(name);
  passes.insert(passes.end(), further.begin(), further.end());
  passes.insert(passes.end(), options.passes.begin(), options.passes.end());
  if (options.backend == CompileBackend::Codegen) {
    // In a parallel mode all ranks draw what one device would. Outside of kernels ATen's operator
    // is the faster one.
    if (!config.fallback_random && !options.parallel_mode && fuses(options)) add("replace_random");
    add("decompose");
    add("join_casts");
  }
  if (options.backend == CompileBackend::Codegen || options.memory_budget) add("recompute");
  if (options.backend == CompileBackend::Codegen) add("fuse");
  add("reuse_memory");
  add("update_early");
  check_functions(passes);
  check_order(passes);
  return passes;
}

/// Kernels were asked for: who doesn't read explain() is to know that there are none.
void warn_interpreted(const std::string& why) {
  static std::atomic<bool> has_warned = false;
  if (has_warned.exchange(true)) return;
  TORCH_WARN("compile: programs are interpreted, without kernels of their own: ", why,
             ". To have it so without this warning, take backend = CompileBackend::Interpret");
}

std::string text_of_bytes(int64_t bytes) { return format_bytes(static_cast<size_t>(bytes)); }

/// What explain() says of the memory of a program, and a warning if that is too much.
void tell_memory(Prepared& prepared, const MemoryReport& report,
                 const std::optional<int64_t>& budget) {
  const int64_t peak = lifetimes_of(prepared.graph).peak_bytes;
  const auto& [values, bytes, added] = report.recomputed;
  counters()["planned_peak_bytes"] = peak;
  counters()["recomputed_values"] = values;
  prepared.memory = c10::str("planned peak: ", text_of_bytes(peak), " (", peak,
                             " bytes) of values that the program makes");
  if (budget) prepared.memory += "; memory_budget: " + text_of_bytes(*budget);
  if (values > 0)
    prepared.memory += c10::str(
        "; ", values, values == 1 ? " value" : " values", " computed again: ", text_of_bytes(bytes),
        " not kept, ", text_of_bytes(std::abs(added)), added > 0 ? " more" : " less", " moved");
  if (!budget || peak <= *budget) return;
  const auto held = report.held_by.empty() ? "" : ", held by " + report.held_by + " and others";
  prepared.over_budget =
      c10::str("expected a memory_budget that can be reached, got ", *budget,
               " bytes; the lowest peak that was found is ", peak, held,
               "; take a smaller batch, or leave gradients out (keep_grads = false)");
}

}  // namespace

void check_options(const CompileOptions& options) {
  for (const auto& each : options.module_override)
    TORCH_CHECK_VALUE(each, "compile: expected an Override in module_override, got null");
  const auto dtype = options.compress_gradients.value_or(at::kHalf);
  TORCH_CHECK_VALUE(dtype == at::kHalf || dtype == at::kBFloat16,
                    "compile: expected compress_gradients to be torch::kHalf or torch::kBFloat16, ",
                    "got ", dtype, "; leave it out to average gradients as they are");
  TORCH_CHECK_VALUE(options.memory_budget.value_or(1) > 0,
                    "compile: expected a memory_budget of at least 1 byte, got ",
                    options.memory_budget.value_or(1), "; leave it out to have none");
  const auto further =
      options.parallel_mode ? options.parallel_mode->passes() : std::vector<Pass>();
  check_disabled(passes_for(options, further), options.disabled_passes);
}

std::vector<std::string> passes_over_messages(const CompileOptions& options,
                                              const std::vector<Pass>& further) {
  std::vector<std::string> names;
  for (const auto& pass : passes_for(options, further)) {
    if (pass.name == "merge_equal" || pass.name == "launch_early" || pass.name == "update_early" ||
        pass.name == "comm_fusion_with_concat" || pass.name.starts_with("bucket_"))
      names.push_back(pass.name);
  }
  return names;
}

CompileOptions of_part(CompileOptions options) {
  options.disabled_passes.emplace_back("replace_random");
  return options;
}

MemoryReport optimise(Graph& graph, const CompileOptions& options,
                      const std::vector<Pass>& further) {
  MemoryReport report;
  auto passes = passes_for(options, further);
  const auto recompute = std::ranges::find(passes, "recompute", &Pass::name);
  if (recompute != passes.end())
    recompute->run = [&](Graph& each) {
      report = fit_to_budget(each, options.memory_budget, fuses(options));
    };
  run_passes(graph, passes,
             {.disabled = options.disabled_passes, .dump_folder = options.dump_folder});
  return report;
}

Prepared prepare(Graph graph, const CompileOptions& options, const std::vector<Pass>& further) {
  Prepared prepared{.graph = graph};
  auto report = optimise(prepared.graph, options, further);
  if (options.backend == CompileBackend::Codegen) {
    if (collected != nullptr) collected->push_back(program_text(prepared.graph));
    const auto sources = write_kernels(prepared.graph);
    auto loaded = load_kernels(sources, &prepared.why_interpreted);
    counters()["distinct_kernels"] = loaded ? sources.distinct() : 0;
    if (loaded) {
      prepared.kernels = std::move(*loaded);
    } else {
      warn_interpreted(prepared.why_interpreted);
      // From the beginning: what was taken apart for kernels is better as it was.
      auto without = options;
      without.backend = CompileBackend::Interpret;
      without.dump_folder.clear();
      prepared.graph = std::move(graph);
      report = optimise(prepared.graph, without, further);
    }
  }
  tell_memory(prepared, report, options.memory_budget);
  ++counters()["graphs"];
  counters()["fused_kernels"] =
      std::count_if(prepared.graph.nodes.begin(), prepared.graph.nodes.end(),
                    [](const Node& node) { return node.op == kFused; });
  return prepared;
}

Executable make_executable(Prepared prepared) {
  const auto program = std::make_shared<Program>(prepared.graph, std::move(prepared.kernels));
  return {[program](const std::vector<at::Tensor>& inputs) { return program->run(inputs); },
          signature_of(prepared.graph)};
}

}  // namespace compiler

CompileBackendOption::CompileBackendOption(const std::string& name)
    : backend_(name == "codegen" ? CompileBackend::Codegen : CompileBackend::Interpret) {
  TORCH_CHECK_VALUE(name == "codegen" || name == "interpret",
                    "compile: expected backend \"codegen\" or \"interpret\", got \"", name, "\"");
}

Executable codegen(Graph graph) {
  return make_executable(
      compiler::prepare(std::move(graph), compiler::of_part({.backend = CompileBackend::Codegen})));
}
Executable interpret(Graph graph) {
  return make_executable(
      compiler::prepare(std::move(graph), {.backend = CompileBackend::Interpret}));
}

std::vector<std::string> detail::code_generated_by(const std::function<void()>& function) {
  std::vector<std::string> sources;
  struct Collect {
    std::vector<std::string>* before;
    explicit Collect(std::vector<std::string>* into)
        : before(std::exchange(compiler::collected, into)) {}
    ~Collect() { compiler::collected = before; }
  } const collect(&sources);
  function();
  return sources;
}

}  // namespace tessera

namespace tessera::compiler {
namespace {

std::vector<GraphInput> flat_state_of(const Graph& graph) {
  std::vector<GraphInput> state;
  for (const auto& input : graph.inputs) {
    if (input.kind == InputKind::Parameter || input.kind == InputKind::Buffer ||
        input.kind == InputKind::State)
      state.push_back(input);
  }
  return state;
}

}  // namespace

OverrideScope::OverrideScope(const Overrides& overrides,
                             const std::vector<torch::nn::Module*>& roots) {
  try {
    for (const auto& each : overrides) {
      for (auto* root : roots) {
        for (const auto& item : root->named_modules("", /*include_self=*/false)) {
          if (auto stand_in = each->replacement(item.key(), *item.value())) {
            auto& hooks =
                nn::require_hook_point(*item.value(), "compile (module_override)").hooks();
            before_.emplace_back(item.value(), hooks.exchange_stand_in(std::move(stand_in)));
          }
        }
      }
    }
  } catch (...) {
    undo();
    throw;
  }
}

OverrideScope::~OverrideScope() { undo(); }

void OverrideScope::undo() noexcept {
  while (!before_.empty()) {  // the last first: two may have replaced one module
    auto& [module, stand_in] = before_.back();
    nn::find_hook_point(*module)->hooks().exchange_stand_in(std::move(stand_in));
    before_.pop_back();
  }
}

std::vector<Pass> transformations(const CompileOptions& options) {
  std::vector<Pass> passes;
  if (!options.module_override.empty()) {
    passes.push_back({"module_override", [&overrides = options.module_override](Graph& graph) {
                        const auto state = flat_state_of(graph);
                        for (const auto& each : overrides) each->transform(graph, state);
                      }});
  }
  if (options.gm_transformation) passes.push_back({"gm_transformation", options.gm_transformation});
  return passes;
}

}  // namespace tessera::compiler

namespace tessera {
namespace {

thread_local CompileConfig current;

void check_mode(const std::string& mode) {
  static const std::vector<std::string> modes = {"python_reducer", "ddp_optimizer",
                                                 "python_reducer_without_compiled_forward",
                                                 "no_optimization"};
  TORCH_CHECK_VALUE(std::find(modes.begin(), modes.end(), mode) != modes.end(),
                    "ConfigPatch: expected optimize_ddp to be one of python_reducer, "
                    "ddp_optimizer, python_reducer_without_compiled_forward, no_optimization, "
                    "got '",
                    mode, "'");
}

}  // namespace

const CompileConfig& compile_config() { return current; }

ConfigPatch::ConfigPatch(const Changes& changes) : before_(current) {
  if (changes.fuse_ddp_passes) {
    std::vector<Pass> passes;
    for (const auto& name : *changes.fuse_ddp_passes) passes.push_back(compiler::find_pass(name));
    compiler::check_order(passes);
  }
  if (changes.optimize_ddp) check_mode(*changes.optimize_ddp);
  TORCH_CHECK_VALUE(changes.bucket_bytes.value_or(1) > 0,
                    "ConfigPatch: expected bucket_bytes above 0, got ",
                    changes.bucket_bytes.value_or(1));
  if (changes.fuse_ddp_passes) current.fuse_ddp_passes = *changes.fuse_ddp_passes;
  if (changes.reorder_for_locality) current.reorder_for_locality = *changes.reorder_for_locality;
  if (changes.optimize_ddp) current.optimize_ddp = *changes.optimize_ddp;
  if (changes.bucket_bytes) current.bucket_bytes = *changes.bucket_bytes;
  if (changes.capture_collectives) current.capture_collectives = *changes.capture_collectives;
  if (changes.fallback_random) current.fallback_random = *changes.fallback_random;
}

ConfigPatch::~ConfigPatch() { current = before_; }

}  // namespace tessera
