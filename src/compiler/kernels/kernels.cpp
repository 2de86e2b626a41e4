#include "compiler/kernels/kernels.h"

#include "compiler/ir/operators.h"
#include "compiler/kernels/host_library.h"
#include "compiler/kernels/kernel_cache.h"
#include "compiler/kernels/loop_nest.h"
#include "compiler/kernels/names.h"
#include "compiler/kernels/nvrtc.h"
#include "compiler/kernels/prelude.h"
#include "compiler/kernels/row_plan.h"
#include "compiler/runtime/cuda_graph.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace tessera::compiler {
namespace {

std::string operators_of(const Graph& body) {
  std::string text;
  std::set<std::string> seen;
  for (const Node& node : body.nodes) {
    const std::string name = short_name(node.op);
    if (!seen.insert(name).second || text.size() + name.size() > 60) continue;
    text += (text.empty() ? "" : "_") + name;
  }
  return text;
}

}  // namespace

std::vector<size_t> kernel_inputs(const Graph& body) {
  std::set<ValueId> read;
  for (size_t lane = 0; lane < kernel_lanes(body); ++lane) {
    for (const ValueId value : lane_reads(body, lane)) read.insert(value);
  }
  std::vector<size_t> inputs;
  for (size_t i = 0; i < body.inputs.size(); ++i) {
    if (read.contains(body.inputs[i].value)) inputs.push_back(i);
  }
  return inputs;
}

Kernel write_kernel(const Graph& body, c10::DeviceType device) {
  Kernel kernel{.operators = operators_of(body),
                .text = "",
                .inputs = kernel_inputs(body),
                .outputs = body.outputs.size()};
  const auto names = name_values(body);
  const bool is_host = device == c10::DeviceType::CPU;
  const bool is_over_rows = has_rows(body);
  if (is_host)
    kernel.text = (is_over_rows ? write_host_rows : write_host_kernel)(body, names, kernel.inputs);
  else if (is_sum_parts(body.nodes.at(0)))
    write_cuda_sum_parts(body, kernel);
  else if (is_list_kernel(body.nodes[0]))
    write_cuda_casts(body, kernel);
  else
    (is_over_rows ? write_cuda_rows : write_cuda_kernel)(body, names, kernel);
  return kernel;
}

namespace {

void run_in_parts(int64_t count, int64_t grain, void (*part)(const void*, int64_t, int64_t),
                  const void* closure) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { part(closure, begin, end); });
}

constexpr Host kHost = {run_in_parts};

std::optional<std::vector<Launch>> load_host(const KernelSources& kernels, size_t source,
                                             std::string* why_not) {
  const auto library = HostLibrary::load(kernels.sources[source].text(), why_not);
  if (!library) return std::nullopt;
  std::vector<Launch> launches(kernels.uses.size());
  for (size_t i = 0; i < kernels.uses.size(); ++i) {
    const auto& use = kernels.uses[i];
    if (!use || use->source != source) continue;
    const auto function = reinterpret_cast<HostKernel>(library->symbol(use->name));
    TORCH_INTERNAL_ASSERT(function != nullptr, "no kernel ", use->name);
    launches[i] = [library, function](void* const* tensors) { function(kHost, tensors); };
  }
  return launches;
}

/// Code of the source for the GPU: of the cache, or compiled and put there.
std::optional<std::string> code_of(const std::string& source, int device, std::string* why_not) {
  const auto* nvrtc = Nvrtc::find(why_not);
  const auto architecture = nvrtc == nullptr ? std::nullopt : architecture_of(device, why_not);
  if (!architecture) return std::nullopt;
  const auto name =
      content_hash(source + '\0' + nvrtc->version() + '\0' + *architecture) + ".cubin";
  constexpr size_t kMost = size_t{1} << 28;
  std::string ignored;
  const auto folder = open_cache(&ignored);
  const size_t hash_size = content_hash("").size();
  if (const auto kept = folder ? folder->read_file(name, kMost) : std::nullopt) {
    // An entry that a full disk or a crash has cut short is not taken.
    if (kept->size() > hash_size &&
        kept->substr(0, hash_size) == content_hash(kept->substr(hash_size)))
      return kept->substr(hash_size);
  }
  auto code = nvrtc->compile(source, *architecture, why_not);
  if (code && folder) folder->replace_file(name, content_hash(*code) + *code);
  return code;
}

/// A kernel on a GPU, with the form for aligned tensors if it has one.
struct CudaKernel {
  std::shared_ptr<CudaModule> library;
  c10::Device device;
  void* function;
  void* vector_function;
  Kernel::Grid grid, vector_grid;
  size_t tensors;
  bool takes_list;

  void operator()(void* const* given) const {
    if (grid.blocks == 0) return;
    std::vector<void*> arguments;
    bool is_aligned = vector_function != nullptr;
    for (size_t i = 0; i < tensors; ++i) {
      is_aligned = is_aligned && reinterpret_cast<uintptr_t>(given[i]) % 16 == 0;
      arguments.push_back(const_cast<void**>(&given[i]));
    }
    if (takes_list) arguments = {const_cast<void**>(given)};
    CudaModule::launch(is_aligned ? vector_function : function, is_aligned ? vector_grid : grid,
                       current_cuda_stream(device), arguments.data());
  }

  /// Kernels do without where there is too little.
  static void take_shared(void* function, Kernel::Grid& grid) {
    if (function != nullptr && grid.shared > 0 && !CudaModule::allow_shared(function, grid.shared))
      grid.shared = 0;
  }
};

std::optional<std::vector<Launch>> load_cuda(const KernelSources& kernels, size_t source,
                                             std::string* why_not) {
  const auto device = kernels.sources[source].device;
  const auto code = code_of(kernels.sources[source].text(), device.index(), why_not);
  const auto library = code ? CudaModule::load(*code, device.index(), why_not) : nullptr;
  if (!library) return std::nullopt;
  std::vector<Launch> launches(kernels.uses.size());
  for (size_t i = 0; i < kernels.uses.size(); ++i) {
    const auto& use = kernels.uses[i];
    if (!use || use->source != source) continue;
    const auto& kernel = use->kernel;
    CudaKernel launch{library,
                      device,
                      library->function(use->name),
                      kernel.vector > 1 ? library->function(use->name + kVectorSuffix) : nullptr,
                      kernel.grid,
                      kernel.vector_grid,
                      kernel.inputs.size() + kernel.outputs,
                      kernel.takes_list};
    TORCH_INTERNAL_ASSERT(launch.function != nullptr, "no kernel ", use->name);
    CudaKernel::take_shared(launch.function, launch.grid);
    CudaKernel::take_shared(launch.vector_function, launch.vector_grid);
    launches[i] = std::move(launch);
  }
  return launches;
}

}  // namespace

std::string KernelSources::Source::text() const {
  const bool is_host = device.is_cpu();
  // In braces, or it would be a constant of this file alone.
  const std::string interface =
      is_host ? c10::str("\nextern \"C\" {\nextern const int ", kHostInterfaceSymbol,
                         ";\nconst int ", kHostInterfaceSymbol, " = ", kHostInterface, ";\n}\n")
              : "";
  return prelude_for(definitions, device.type()) + interface + definitions;
}

std::string KernelSources::text() const {
  std::string all;
  for (const auto& source : sources) all += source.text() + "\n";
  return all;
}

int64_t KernelSources::distinct() const {
  std::unordered_set<std::string> names;
  for (const auto& use : uses) {
    if (use) names.insert(use->name);
  }
  return std::ssize(names);
}

KernelSources write_kernels(const Graph& graph) {
  KernelSources kernels;
  kernels.uses.resize(graph.nodes.size());
  std::unordered_map<std::string, KernelSources::Use> written;  // by device, operators and text
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (node.op != kFused) continue;
    const auto device = graph.type(node.defined().at(0)).device;
    auto source = std::ranges::find(kernels.sources, device, &KernelSources::Source::device);
    if (source == kernels.sources.end())
      source = kernels.sources.insert(kernels.sources.end(), {.device = device});
    Kernel kernel = write_kernel(*node.body, device.type());
    auto& use = written[device.str() + kernel.operators + kernel.text];
    if (use.name.empty()) {
      use.name = kernel_prefix(device.type()) + kernel.operators + "_" +
                 std::to_string(written.size() - 1);
      use.source = static_cast<size_t>(source - kernels.sources.begin());
      source->definitions += "\n";
      use.begin = source->definitions.size();
      for (const char character : kernel.text)
        source->definitions += character == kKernelName ? use.name : std::string(1, character);
      use.end = source->definitions.size();
    }
    kernel.text.clear();
    kernels.uses[i] = use;
    kernels.uses[i]->kernel = std::move(kernel);
  }
  return kernels;
}

std::optional<std::vector<Launch>> load_kernels(const KernelSources& kernels,
                                                std::string* why_not) {
  std::vector<Launch> launches(kernels.uses.size());
  for (size_t source = 0; source < kernels.sources.size(); ++source) {
    auto loaded = kernels.sources[source].device.is_cpu() ? load_host(kernels, source, why_not)
                                                          : load_cuda(kernels, source, why_not);
    if (!loaded) return std::nullopt;
    for (size_t i = 0; i < launches.size(); ++i) {
      if ((*loaded)[i]) launches[i] = std::move((*loaded)[i]);
    }
  }
  return launches;
}

}  // namespace tessera::compiler
