#include "compiler/spmd/distributed_run.h"

#include "base/dispatcher.h"
#include "base/text.h"
#include "compiler/ir/operators.h"
#include "compiler/record/dry_run.h"
#include "compiler/spmd/batch_dims.h"
#include "compiler/spmd/expand.h"
#include "compiler/spmd/node_call.h"
#include "compiler/spmd/one_device.h"
#include "dtensor/random.h"
#include "dtensor/redistribute.h"
#include "dtensor/registration.h"
#include "dtensor/scopes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

bool is_gradient_mark(const Node& node) { return node.op == "tessera::gradient"; }

const Placement& placed(const at::Tensor& tensor) {
  return dtensor::part_of(tensor).spec->placements[0];
}

const at::Tensor& part(const at::Tensor& tensor) { return dtensor::part_of(tensor).local(); }

/// Sees or writes memory by strides, which are those of all samples: a rank's part lies otherwise.
/// as_strided counts from where memory begins, which is where its argument does unless that is a
/// view.
bool is_by_strides(const Graph& graph, const Node& node) {
  if (node.op.starts_with("tessera::window")) return true;
  if (node.op != "aten::as_strided") return false;
  return std::none_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& other) {
    return is_view(other) && other.defined() == node.arguments[0].values;
  });
}

template <class Predicate>
bool any_used(const Node& node, Predicate predicate) {
  const auto used = node.used();
  return std::any_of(used.begin(), used.end(), predicate);
}

/// The same values, with strides in the order of `type`'s.
at::Tensor with_layout(const at::Tensor& tensor, const ValueType& type) {
  if (type.is_contiguous()) return tensor;
  const auto order = SpmdBuilder::order_in_memory(type);
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i)
    back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  return tensor.permute(order).clone(at::MemoryFormat::Contiguous).permute(back);
}

}  // namespace

DistributedRun::DistributedRun(const Graph& graph, const std::vector<bool>& interleaved,
                               ParallelCall& call, const OneDeviceSettings& settings)
    : graph_(graph),
      interleaved_(interleaved),
      call_(call),
      settings_(settings),
      locality_(graph),
      ranks_(call.mesh.size()),
      group_(call.mesh.group()),
      values_(graph.value_count()),
      is_update_(graph.value_count(), false) {
  for (const auto& lengths : call.batch_sizes) {
    if (batch_.empty()) batch_ = lengths;
  }
  for (const auto length : batch_) batch_size_ += length;
}

Recording DistributedRun::recorded() {
  const at::NoGradGuard no_grad;
  TensorNames names;
  for (size_t i = 0; i < graph_.inputs.size(); ++i) {
    locals_.push_back(local_of(i));
    names.add(locals_[i], graph_.inputs[i].kind, graph_.inputs[i].name);
  }
  const auto restore =
      c10::make_scope_exit([state = random_state_of(locals_)] { state.restore(); });
  auto recording = record([this] { return run_all(); }, locals_, names, {}, {});
  for (auto& [generator, state] : recording.generators) generator.set_state(state);
  return recording;
}

at::Tensor DistributedRun::moved(const at::Tensor& tensor, const Placement& to) const {
  return dtensor::redistributed("DataParallel", tensor, dtensor::make_spec(call_.mesh, {to}));
}

at::Tensor DistributedRun::wrapped(const at::Tensor& local, const Placement& placement,
                                   const ValueType& type) const {
  return dtensor::wrap(local, dtensor::make_spec(call_.mesh, {placement}), type.sizes,
                       type.strides);
}

Placement DistributedRun::by_mode(const ValueType& type) const {
  return settings_.shards && !type.sizes.empty() ? Shard(0) : Replicate();
}

Placement DistributedRun::placement_of_input(size_t input) const {
  const auto kind = graph_.inputs[input].kind;
  const auto& type = graph_.type(graph_.inputs[input].value);
  if (kind == InputKind::Argument) return type.placement.value_or(Replicate());
  return kind == InputKind::Buffer || kind == InputKind::Outside ? Replicate() : by_mode(type);
}

/// What stands for an input. It is not written: a captured step copies first.
at::Tensor DistributedRun::local_of(size_t index) const {
  const auto& input = graph_.inputs[index];
  const auto& type = graph_.type(input.value);
  const auto given = call_.inputs.at(index).detach();
  const bool is_own = input.kind == InputKind::Parameter || input.kind == InputKind::State;
  if (!is_own) return given;
  TORCH_CHECK_NOT_IMPLEMENTED(SpmdBuilder::fills_memory(type), "DataParallel: expected ",
                              input.name, " to fill its memory, got sizes ",
                              c10::IntArrayRef(type.sizes), " with strides ",
                              c10::IntArrayRef(type.strides), "; give the module a clone() of it");
  if (by_mode(type).is_replicate()) return given.clone(at::MemoryFormat::Contiguous);
  const auto mine = dtensor::chunk_of(type.sizes[0], ranks_, group_->getRank());
  return given.narrow(0, mine.offset, mine.length).clone(at::MemoryFormat::Contiguous);
}

void DistributedRun::place_input(size_t index) {
  const auto& input = graph_.inputs[index];
  const auto& type = graph_.type(input.value);
  const auto placement = placement_of_input(index);
  const auto& local = locals_[index];
  is_update_[static_cast<size_t>(input.value)] = input.kind == InputKind::State;
  if (input.kind == InputKind::Argument && placement.is_shard()) {
    const auto size = type.sizes[static_cast<size_t>(placement.dim())];
    const auto rows =
        move_rows(local, placement.dim(), batch_, chunk_lengths(size, ranks_), group_);
    at(input.value) = wrapped(rows, placement, type);
  } else if (input.kind == InputKind::Parameter || input.kind == InputKind::State) {
    // Ranks hold rows, one after the other.
    const auto rows = SpmdBuilder::contiguous_type(type);
    at(input.value) = with_layout(wrapped(local, placement, rows), type);
  } else {
    at(input.value) = wrapped(local, placement, type);
  }
}

std::vector<at::Tensor> DistributedRun::run_all() {
  dtensor::ensure_registered();
  const dtensor::LocalScope below_autograd;
  const ImplicitReplication numbers;
  comm_debug counts;
  for (size_t i = 0; i < locals_.size(); ++i) place_input(i);
  note_moved_inputs(counts);
  for (const auto& node : graph_.nodes) run(node, counts);
  std::vector<at::Tensor> results;
  for (const auto& output : graph_.outputs) results.push_back(local_output(output));
  values_.clear();  // what somebody holds after a recording is taken for a user's
  gathered_.clear();
  return results;
}

void DistributedRun::note_moved_inputs(const comm_debug& counts) {
  const auto found = counts.counts().find("all_to_all");
  if (found == counts.counts().end()) return;
  call_.notes.push_back(c10::str("DataParallel: ranks have parts of ", c10::IntArrayRef(batch_),
                                 " samples, which are moved to be ",
                                 c10::IntArrayRef(chunk_lengths(batch_size_, ranks_)), ": ",
                                 found->second.bytes, " bytes of this rank's arguments"));
}

void DistributedRun::run(const Node& node, comm_debug& counts) {
  counts.reset();
  auto& nodes = Recorder::current()->graph().nodes;
  const size_t begin = nodes.size();
  if (is_gradient_mark(node))
    reduce_gradient(node);
  else if (is_random(node))
    draw(node);
  else
    execute(node, counts);
  const bool is_of_update = is_gradient_mark(node) || is_update(node);
  for (const auto value : node.defined()) {
    is_update_[static_cast<size_t>(value)] = is_of_update;
    place_result(value);
    note_placement(value);
  }
  for (size_t i = begin; i < nodes.size(); ++i) nodes[i].module = node.module;
  if (!is_gradient_mark(node)) note_communication(node, counts);
}

bool DistributedRun::is_update(const Node& node) const {
  return any_used(node, [&](ValueId value) { return is_update_[static_cast<size_t>(value)]; });
}

bool DistributedRun::meets_batch(const Node& node) const {
  return any_used(node, [&](ValueId value) { return locality_.is_local(value); });
}

bool DistributedRun::gathers_parameters(const Node& node) const {
  return meets_batch(node) || (is_view(node) && !is_update(node));
}

void DistributedRun::reduce_gradient(const Node& node) {
  const auto gradient = at(node.arguments[0].values[0]);
  const auto result = node.results[0].values[0];
  const auto reduced =
      locality_.is_summand(node) ? gradient : moved(gradient, by_mode(graph_.type(result)));
  at(result) = reduced.is_same(gradient) ? gradient.clone() : reduced;
}

at::Tensor DistributedRun::operand(ValueId value, bool gathers) {
  const auto& tensor = at(value);
  if (!gathers || locality_.is_local(value) || !placed(tensor).is_shard()) return tensor;
  const auto [known, is_new] = gathered_.try_emplace(value);
  // Rows come one after the other.
  if (is_new) known->second = with_layout(moved(tensor, Replicate()), graph_.type(value));
  return known->second;
}

at::Tensor DistributedRun::unsharded(ValueId value) {
  const auto& type = graph_.type(value);
  const auto all = part(with_layout(moved(at(value), Replicate()), type));
  const bool is_alike = all.strides() == type.strides && all.storage_offset() == 0;
  return is_alike ? all : at::empty_strided(type.sizes, type.strides, all.options()).copy_(all);
}

torch::jit::Stack DistributedRun::stack_of(const Node& node,
                                           const std::function<at::Tensor(ValueId)>& tensor_of) {
  return arguments_of(node, find_operator(node.op)->schema(), tensor_of);
}

void DistributedRun::execute(const Node& node, comm_debug& counts) {
  TORCH_CHECK_NOT_IMPLEMENTED(find_operator(node.op) && !is_collective(node),
                              "DataParallel: expected a step of one rank, without messages of its "
                              "own, got ",
                              describe(node), "; give it a model that is not parallel");
  if (const auto dim = made_dim(node); dim >= 0) return make_part(node, dim);
  if (is_by_strides(graph_, node))
    return call_and_store(node, stack_of(node, [&](ValueId value) { return unsharded(value); }));
  const bool gathers = gathers_parameters(node);
  for (const auto value : node.used()) operand(value, gathers);
  counts.reset();  // parameters are no samples
  // What all ranks have is computed by each, as a plain tensor.
  const bool is_alike = !any_used(
      node, [&](ValueId value) { return !placed(operand(value, gathers)).is_replicate(); });
  call_and_store(node, stack_of(node, [&](ValueId value) {
                   const auto tensor = operand(value, gathers);
                   return is_alike ? part(tensor) : tensor;
                 }));
}

void DistributedRun::call_and_store(const Node& node, torch::jit::Stack stack) {
  const auto op = find_operator(node.op);
  std::vector<c10::IValue> consumed;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    if (writes(node, i)) consumed.push_back(stack[i]);
  }
  call_boxed(*op, stack);
  size_t next = 0;
  for (const auto& each : consumed) store(node.results.at(next++), each);
  for (const size_t i : own_returns(op->schema())) store(node.results.at(next++), stack.at(i));
}

void DistributedRun::store(const Argument& result, const c10::IValue& value) {
  const auto keep = [&](ValueId id, const at::Tensor& tensor) {
    if (id == kNoValue || !tensor.defined()) return;
    at(id) = dtensor::has_part(tensor) ? tensor : wrapped(tensor, Replicate(), type_of(tensor));
  };
  if (value.isTensor()) return keep(result.values[0], value.toTensor());
  const auto tensors = value.toTensorVector();
  for (size_t i = 0; i < tensors.size(); ++i) keep(result.values.at(i), tensors[i]);
}

int64_t DistributedRun::made_dim(const Node& node) {
  if (batch_size_ < 2 || (!is_broadcast(node) && !is_constant_of_sizes(node))) return -1;
  const auto& sizes = graph_.type(node.results[0].values[0]).sizes;
  const auto found = std::find(sizes.begin(), sizes.end(), batch_size_);
  if (found == sizes.end()) return -1;
  const auto dim = static_cast<int64_t>(found - sizes.begin());
  if (!is_broadcast(node)) return dim;
  const auto& tensor = at(node.arguments[0].values[0]);
  const auto own = dim - (std::ssize(sizes) - tensor.dim());
  const bool is_wide = own >= 0 && tensor.size(own) != 1;
  return placed(tensor).is_replicate() && !is_wide ? dim : -1;
}

void DistributedRun::make_part(const Node& node, int64_t dim) {
  const auto result = node.results[0].values[0];
  auto stack = stack_of(node, [&](ValueId value) { return part(at(value)); });
  auto& argument = stack[is_broadcast(node) ? 1 : 0];
  auto sizes = argument.toIntVector();
  sizes[static_cast<size_t>(dim)] =
      dtensor::chunk_of(batch_size_, ranks_, group_->getRank()).length;
  argument = sizes;
  call_boxed(*find_operator(node.op), stack);
  at(result) = wrapped(stack.at(0).toTensor(), Shard(dim), graph_.type(result));
}

void DistributedRun::draw(const Node& node) {
  Placement placement = Replicate();
  call_and_store(node, stack_of(node, [&](ValueId value) {
                   auto tensor = at(value);
                   if (placed(tensor).is_partial()) tensor = moved(tensor, Replicate());
                   if (!placed(tensor).is_shard()) return part(tensor);
                   placement = placed(tensor);
                   const auto& sizes = graph_.type(value).sizes;
                   auto whole = at::ones(sizes, part(tensor).options());
                   const auto& spec = *dtensor::part_of(tensor).spec;
                   dtensor::local_part_of(whole, spec).copy_(part(tensor));
                   return whole;
                 }));
  for (const auto value : node.defined()) {
    if (placement.is_shard() && placement.dim() < at(value).dim())
      at(value) = moved(at(value), placement).clone();
  }
}

void DistributedRun::place_result(ValueId value) {
  if (!at(value).defined() || !locality_.is_local(value)) return;
  const auto& wanted = graph_.type(value).placement;
  if (wanted && wanted->is_shard() && placed(at(value)) != *wanted)
    at(value) = moved(at(value), *wanted);
}

void DistributedRun::note_placement(ValueId value) {
  if (!at(value).defined() || part(at(value)).numel() == 0) return;
  if (const auto id = Recorder::current()->memory().find_current(part(at(value))))
    placements_[*id] = placed(at(value));
}

void DistributedRun::note_communication(const Node& node, const comm_debug& counts) {
  if (!meets_batch(node) || counts.counts().empty()) return;
  std::vector<std::string> kinds;
  int64_t bytes = 0, gathered = 0;
  for (const auto& [kind, count] : counts.counts()) {
    kinds.push_back(kind);
    bytes += count.bytes;
    if (kind == "all_gather" || kind == "all_to_all") gathered += count.bytes;
  }
  TORCH_CHECK_VALUE(
      settings_.on_mix == OnMix::Gather || gathered == 0,
      "DataParallel: expected operators that treat samples one by one (on_mix = Error), got ",
      describe(node), ", for which each rank sends ", gathered,
      " bytes of activations; take OnMix::Gather, or another operator");
  call_.notes.push_back(c10::str("DataParallel: ", describe(node),
                                 " takes samples of several ranks: ", format_list(kinds), " of ",
                                 bytes, " bytes", gathered > 0 ? " of activations" : ""));
}

at::Tensor DistributedRun::local_output(const GraphOutput& output) {
  if (output.kind == OutputKind::Result) return local_result(output.value);
  if (output.value == kNoValue) return {};
  size_t input = 0;
  while (graph_.inputs.at(input).value != output.target) ++input;
  return part(moved(at(output.value), placement_of_input(input)));
}

at::Tensor DistributedRun::local_result(ValueId value) {
  auto& result = call_.results.emplace_back();
  if (value == kNoValue) return {};
  const auto& tensor = at(value);
  const auto& type = graph_.type(value);
  const auto& placement = placed(tensor);
  if (settings_.returns_dtensors) {
    result = ResultPlacement{placement, type.sizes};
    return part(tensor);
  }
  const bool is_batch = placement.is_shard() && type.placement == placement &&
                        !interleaved_[static_cast<size_t>(value)];
  const auto size = is_batch ? type.sizes[static_cast<size_t>(placement.dim())] : 0;
  if (!is_batch || size % batch_size_ != 0) return part(moved(tensor, Replicate()));
  auto lengths = batch_;  // of this rank's own samples
  for (auto& length : lengths) length *= size / batch_size_;
  return move_rows(part(tensor), placement.dim(), chunk_lengths(size, ranks_), lengths, group_);
}

}  // namespace tessera::compiler
