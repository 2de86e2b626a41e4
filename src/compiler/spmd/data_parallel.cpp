#include "compiler/spmd/data_parallel.h"

#include <tessera/comm.h>
#include <tessera/compile/data_parallel.h>

#include "base/text.h"
#include "compiler/spmd/batch_dims.h"
#include "compiler/spmd/expand.h"
#include "compiler/spmd/one_device.h"
#include "dtensor/redistribute.h"
#include "dtensor/sharding.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

namespace tessera {
namespace {

/// Samples with which a step is looked at that is given one alone.
constexpr int64_t kProbe = 3;

/// Names of inputs that are arguments begin so; their number follows.
constexpr std::string_view kArgument = "argument ";

std::optional<size_t> argument_index(const std::string& name) {
  size_t index = 0;
  if (!name.starts_with(kArgument)) return std::nullopt;
  const auto* const end = name.data() + name.size();
  if (std::from_chars(name.data() + kArgument.size(), end, index).ptr != end) return std::nullopt;
  return index;
}

/// The dimension that the options mean, counted from the front.
int64_t checked_dim(const std::string& name, c10::IntArrayRef sizes, int64_t batch_dim) {
  const auto ndim = static_cast<int64_t>(sizes.size());
  const auto dim = batch_dim < 0 ? batch_dim + ndim : batch_dim;
  TORCH_CHECK_VALUE(dim >= 0 && dim < ndim,
                    "DataParallel: expected tensors with a batch dimension ", batch_dim, ", but ",
                    name, " has sizes ", sizes,
                    "; give another input_batch_dim, or input_batch_dims with none for it if it ",
                    "has no batch");
  return dim;
}

/// Every rank's lengths, by argument.
std::vector<std::vector<int64_t>> gather_lengths(const std::vector<int64_t>& lengths,
                                                 const DeviceMesh& mesh) {
  const std::string mine(reinterpret_cast<const char*>(lengths.data()),
                         lengths.size() * sizeof(int64_t));
  const auto all = gather_bytes(mine, mesh.group());
  std::vector<std::vector<int64_t>> by_argument(lengths.size());
  for (size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK_VALUE(all[rank].size() == mine.size(), "DataParallel: expected ", lengths.size(),
                      " tensors among the arguments on all ranks, but rank ", rank, " has ",
                      all[rank].size() / sizeof(int64_t));
    std::vector<int64_t> theirs(lengths.size());
    std::memcpy(theirs.data(), all[rank].data(), mine.size());
    for (size_t i = 0; i < theirs.size(); ++i) by_argument[i].push_back(theirs[i]);
  }
  return by_argument;
}

/// Dtypes and sizes of arguments, with -1 for the batch.
void require_same_kinds(const std::vector<at::Tensor>& arguments, const std::vector<int>& dims,
                        const DeviceMesh& mesh) {
  std::string mine;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].defined()) continue;
    auto sizes = arguments[i].sizes().vec();
    if (dims[i] >= 0) sizes[static_cast<size_t>(dims[i])] = -1;
    mine += c10::str(mine.empty() ? "" : ", ", arguments[i].scalar_type(), c10::IntArrayRef(sizes));
  }
  const auto all = gather_bytes(mine, mesh.group());
  for (size_t rank = 0; rank < all.size(); ++rank)
    TORCH_CHECK_VALUE(all[rank] == mine,
                      "DataParallel: expected arguments of the same dtypes and sizes on all ranks, "
                      "but for the batch (-1), got ",
                      mine, " on this rank and ", all[rank], " on rank ", rank,
                      "; pad them to one size");
}

/// The same samples again and again, as many as all ranks have: a capture looks at sizes.
at::Tensor enlarged(const at::Tensor& tensor, int64_t dim, int64_t length) {
  auto sizes = tensor.sizes().vec();
  const auto own = sizes[static_cast<size_t>(dim)];
  sizes[static_cast<size_t>(dim)] = length;
  auto whole = at::empty_strided(sizes, dtensor::dense_strides_like(sizes, tensor.strides()),
                                 tensor.options());
  if (own == 0) return whole.zero_();
  const auto indices =
      at::arange(length, tensor.options().dtype(at::kLong).requires_grad(false)).remainder(own);
  return whole.copy_(tensor.detach().index_select(dim, indices));
}

/// Arguments with batches of this length along `dims`; -1: it has none.
std::vector<at::Tensor> resized(const std::vector<at::Tensor>& arguments,
                                const std::vector<int>& dims, int64_t length) {
  auto tensors = arguments;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (dims[i] >= 0) tensors[i] = enlarged(tensors[i], dims[i], length);
  }
  return tensors;
}

bool has_target(const std::vector<at::Tensor>& arguments, int64_t target) {
  return std::any_of(arguments.begin(), arguments.end(), [&](const at::Tensor& tensor) {
    return tensor.defined() && c10::isIntegralType(tensor.scalar_type(), false) &&
           tensor.eq(target).any().item<bool>();
  });
}

/// Tells of operators that mix samples, each once.
void tell(const Graph& graph, const std::vector<compiler::SampleMix>& mixes, OnMix on_mix,
          ParallelCall& call) {
  std::set<std::string> told;
  for (const auto& [node, each_rank, ignored_target] : mixes) {
    const auto what = compiler::describe(graph.nodes[node]);
    const bool is_certain = !ignored_target || has_target(call.arguments, *ignored_target);
    const auto condition =
        ignored_target ? c10::str(" where targets are ", *ignored_target) : std::string();
    TORCH_CHECK_VALUE(on_mix != OnMix::Error || !is_certain,
                      "DataParallel: expected operators that treat samples one by one ",
                      "(on_mix = Error), got ", what, condition, "; each rank would compute ",
                      each_rank, "; take DataParallelSemantics::OneDevice, or another operator");
    auto line =
        c10::str("DataParallel: ", what, " mixes samples", condition, ": each rank computes ",
                 each_rank, ", which one device would do for the whole batch");
    if (!told.insert(line).second) continue;
    if (is_certain) call.warnings.push_back(line);
    call.notes.push_back(std::move(line));
  }
}

std::vector<ValueId> results_of(const Graph& graph) {
  std::vector<ValueId> results;
  for (const auto& output : graph.outputs) {
    if (output.kind == OutputKind::Result) results.push_back(output.value);
  }
  return results;
}

/// As they are placed in `analysed`, which may be of more samples; null: that is not known.
/// Whether what is known of one holds for the other, of another number of samples.
bool differ_in_batch_alone(const ValueType& own, const ValueType& analysed) {
  if (own.sizes.size() != analysed.sizes.size()) return false;  // one sample was squeezed
  for (size_t dim = 0; dim < own.sizes.size(); ++dim) {
    const bool is_batch =
        analysed.placement->is_shard() && std::cmp_equal(analysed.placement->dim(), dim);
    if (!is_batch && own.sizes[dim] != analysed.sizes[dim]) return false;
  }
  return true;
}

void place_results(const Graph& graph, const Graph* analysed, const std::vector<bool>& interleaved,
                   ParallelCall& call) {
  const auto results = results_of(graph);
  const auto known = analysed == nullptr ? std::vector<ValueId>() : results_of(*analysed);
  for (size_t i = 0; i < results.size(); ++i) {
    auto& result = call.results.emplace_back();
    const auto value = known.size() == results.size() ? known[i] : kNoValue;
    const auto placement = value == kNoValue || interleaved[static_cast<size_t>(value)]
                               ? std::nullopt
                               : analysed->type(value).placement;
    if (!placement || results[i] == kNoValue ||
        !differ_in_batch_alone(graph.type(results[i]), analysed->type(value))) {
      call.notes.push_back(c10::str("DataParallel: result ", i,
                                    " has no placement, and is returned as a plain tensor"));
      continue;
    }
    result = ResultPlacement{*placement, graph.type(results[i]).sizes};
    if (placement->is_shard())  // ranks come with batches of one size
      result->sizes[static_cast<size_t>(placement->dim())] *= call.mesh.size();
  }
}

/// The one that is called so.
DataParallelStyle style_of(std::string_view name) {
  if (name == "default") return DataParallelStyle::Default;
  if (name == "replicate") return DataParallelStyle::Replicate;
  TORCH_CHECK_VALUE(name == "fully_shard",
                    "DataParallel: expected parallel_style \"replicate\", \"fully_shard\" or "
                    "\"default\", got \"",
                    name, "\"");
  return DataParallelStyle::FullyShard;
}

}  // namespace

DataParallel::DataParallel(DataParallelStyle style, DataParallelOptions options)
    : style_(style), options_(std::move(options)) {}

DataParallel::DataParallel(const std::string& style, DataParallelOptions options)
    : DataParallel(style_of(style), std::move(options)) {}

DeviceMesh DataParallel::mesh(c10::DeviceType device) const {
  return init_device_mesh(device, {world_size()}, {"dp"});
}

bool DataParallel::takes_uneven_batches() const {
  return options_.semantics == DataParallelSemantics::OneDevice && options_.uneven_batches;
}

std::optional<int64_t> DataParallel::batch_dim_of(size_t argument) const {
  const auto& dims = options_.input_batch_dims;
  if (dims.empty()) return options_.input_batch_dim;
  TORCH_CHECK_VALUE(argument < dims.size(), "DataParallel: expected input_batch_dims for all ",
                    "tensors among the arguments, got ", dims.size(), ", and none for argument ",
                    argument, "; give one for each, std::nullopt if it has no batch");
  return dims[argument];
}

void DataParallel::prepare(ParallelCall& call) const {
  std::vector<int64_t> lengths;  // -1: no batch
  std::vector<int> dims;         // likewise
  std::optional<size_t> first;
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    const auto& tensor = call.arguments[i];
    lengths.push_back(-1);
    dims.push_back(-1);
    const auto wanted = tensor.defined() ? batch_dim_of(i) : std::nullopt;
    if (!wanted) continue;
    const auto name = c10::str(kArgument, i);
    const auto dim = checked_dim(name, tensor.sizes(), *wanted);
    dims[i] = static_cast<int>(dim);
    lengths[i] = tensor.size(dim);
    if (!first) first = i;
    TORCH_CHECK_VALUE(lengths[i] == lengths[*first], "DataParallel: expected ", lengths[*first],
                      " samples in ", name, ", as in argument ", *first, ", got ", lengths[i],
                      " along dimension ", *wanted, " of its sizes ", tensor.sizes(),
                      "; give another input_batch_dim, or input_batch_dims for each tensor");
  }
  if (options_.semantics == DataParallelSemantics::PerRank) {
    // Sizes of 1 don't show where one sample is.
    if (first && lengths[*first] < 2) call.probe = resized(call.arguments, dims, kProbe);
    return;
  }
  const auto all = gather_lengths(lengths, call.mesh);
  require_same_kinds(call.arguments, dims, call.mesh);
  int64_t length = 0;
  for (size_t i = 0; i < lengths.size(); ++i)
    call.batch_sizes.push_back(lengths[i] < 0 ? std::vector<int64_t>() : all[i]);
  if (first) length = std::accumulate(all[*first].begin(), all[*first].end(), int64_t{0});
  call.captured = resized(call.arguments, dims, length);
}

void DataParallel::place_arguments(Graph& graph) const {
  for (const auto& input : graph.inputs) {
    if (input.kind != InputKind::Argument) continue;
    auto& type = graph.type(input.value);
    const auto index = argument_index(input.name);
    const auto dim = index ? batch_dim_of(*index) : std::optional(options_.input_batch_dim);
    type.placement = dim ? Shard(checked_dim(input.name, type.sizes, *dim)) : Replicate();
  }
}

bool DataParallel::shards(const Graph& graph, ParallelCall& call) const {
  if (style_ != DataParallelStyle::Default) return style_ == DataParallelStyle::FullyShard;
  if (call.chosen.empty()) {
    const auto choice = compiler::choose_style(graph, call.mesh, options_.memory_budget);
    call.chosen = choice.shards ? "fully_shard" : "replicate";
    call.notes.push_back(choice.why);
  }
  return style_of(call.chosen) == DataParallelStyle::FullyShard;
}

void DataParallel::analyse(Graph& graph, ParallelCall& call) const {
  const auto& why_not = call.why_not_probed;
  const bool is_probed = !call.probe.empty() && why_not.empty();
  auto& analysed = is_probed ? call.probed : graph;
  if (is_probed) place_arguments(analysed);
  auto found = compiler::find_batch_dims(analysed, call.mesh, /*refuses_one=*/!why_not.empty());
  if (!why_not.empty()) {
    const auto what = c10::str("whether samples are mixed, since this rank has one sample and the ",
                               "step does not take ", kProbe, ": ", why_not);
    TORCH_CHECK_VALUE(options_.on_mix != OnMix::Error,
                      "DataParallel: expected a step that takes any number of samples ",
                      "(on_mix = Error), but it can't be told ", what,
                      "; give another input_batch_dim, or more samples");
    call.notes.push_back("DataParallel: it can't be told " + what);
    found.mixes.clear();
  }
  tell(analysed, found.mixes, options_.on_mix, call);
  if (options_.returns_dtensors)
    place_results(graph, why_not.empty() ? &analysed : nullptr, found.interleaved, call);
}

void DataParallel::partition(Graph& graph, const DeviceMesh& mesh) const {
  ParallelCall call{.mesh = mesh, .arguments = {}};
  partition(graph, call);
}

void DataParallel::partition(Graph& graph, ParallelCall& call) const {
  place_arguments(graph);
  const bool is_sharded = shards(graph, call);
  if (options_.semantics == DataParallelSemantics::OneDevice)
    return compiler::expand_as_one_device(graph, call,
                                          {.shards = is_sharded,
                                           .returns_dtensors = options_.returns_dtensors,
                                           .on_mix = options_.on_mix});
  analyse(graph, call);
  compiler::expand_to_spmd(graph, {.group = call.mesh.group()->getGroupName(),
                                   .ranks = call.mesh.size(),
                                   .rank = call.mesh.local_rank(),
                                   .shards = is_sharded});
}

}  // namespace tessera

namespace tessera::compiler {
namespace {

/// What a rank keeps from step to step, and what it sends in one, by style.
struct Demand {
  int64_t replicated_bytes = 0, sharded_bytes = 0;
  double replicated_cost = 0, sharded_cost = 0;
};

Demand demand_of(const Graph& graph, int64_t ranks) {
  const std::vector<int64_t> mesh_shape = {ranks};
  Demand demand;
  for (const auto& input : graph.inputs) {
    const auto& type = graph.type(input.value);
    const bool is_parameter = input.kind == InputKind::Parameter;
    if (!is_parameter && input.kind != InputKind::State) continue;
    const int64_t copies = is_parameter ? 2 : 1;  // it and its gradient
    const int64_t rows = type.sizes.empty() ? 1 : std::max<int64_t>(type.sizes[0], 1);
    const int64_t own = type.sizes.empty() ? 1 : dtensor::chunk_of(rows, ranks, 0).length;
    demand.replicated_bytes += copies * type.bytes();
    demand.sharded_bytes += copies * type.bytes() / rows * own;
    if (!is_parameter || type.sizes.empty()) continue;
    const dtensor::Layout layout{type.sizes, static_cast<int64_t>(c10::elementSize(type.dtype)),
                                 mesh_shape};
    const auto cost = [&](const Placement& from, const Placement& to) {
      return dtensor::find_path(layout, {from}, {to}).cost;
    };
    demand.replicated_cost += cost(Partial(), Replicate());
    demand.sharded_cost += cost(Partial(), Shard(0)) + cost(Shard(0), Replicate());
  }
  return demand;
}

int64_t free_bytes(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU)
    return static_cast<int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  const auto current = at::accelerator::getDeviceIndex();
  return static_cast<int64_t>(at::accelerator::getMemoryInfo(current).first);
}

/// Ranks of one host share its memory; those of one GPU share that.
int64_t common_budget(const DeviceMesh& mesh) {
  const auto device = mesh.device_type();
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::string where = host.data();
  if (device != c10::DeviceType::CPU) where += c10::str(":", at::accelerator::getDeviceIndex());
  const auto all = gather_bytes(c10::str(free_bytes(device), "@", where), mesh.group());
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& entry : all) {
    const auto place = entry.substr(entry.find('@'));
    const auto sharing = std::count_if(all.begin(), all.end(), [&](const std::string& other) {
      return other.substr(other.find('@')) == place;
    });
    least = std::min<int64_t>(least, std::stoll(entry) / (2 * sharing));
  }
  return least;
}

}  // namespace

StyleChoice choose_style(const Graph& graph, const DeviceMesh& mesh,
                         std::optional<int64_t> budget) {
  const auto demand = demand_of(graph, mesh.size());
  const auto limit = budget ? *budget : common_budget(mesh);
  StyleChoice choice;
  choice.shards = demand.replicated_bytes > limit && demand.sharded_bytes < demand.replicated_bytes;
  const auto bytes = [](int64_t count) { return format_bytes(static_cast<size_t>(count)); };
  choice.why = c10::str(
      "DataParallel: \"default\" is \"", choice.shards ? "fully_shard" : "replicate",
      "\": parameters, gradients and optimizer state take ", bytes(demand.replicated_bytes),
      " on each rank if replicated, ", bytes(demand.sharded_bytes), " if sharded, of a budget of ",
      bytes(limit), "; messages cost ", static_cast<int64_t>(demand.replicated_cost), " against ",
      static_cast<int64_t>(demand.sharded_cost));
  return choice;
}

}  // namespace tessera::compiler
