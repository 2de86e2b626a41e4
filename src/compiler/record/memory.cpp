#include "compiler/record/memory.h"

#include "base/storage.h"
#include "compiler/record/dispatch_key.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace tessera::compiler {
namespace {

/// All of the memory of which it shows a part.
at::Tensor storage_bytes(const at::Tensor& part) {
  auto whole = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(part.storage()),
                                                        part.key_set(), part.dtype());
  const int64_t count = static_cast<int64_t>(part.storage().nbytes() / part.itemsize());
  whole.unsafeGetTensorImpl()->set_sizes_contiguous(at::IntArrayRef(count));
  return whole;
}

/// A parameter, as it shows its memory now: with replicate's mixed precision it may show a copy
/// when the code has come to its end.
at::Tensor as_shown(const at::Tensor& parameter) {
  auto shown = parameter.variable_data();
  shown.set_requires_grad(true);
  return shown;
}

at::Tensor copy_of(const at::Tensor& tensor) {
  const RunScope run;
  auto copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
  return copy.copy_(tensor);
}

ValueType type_of(const Window& window, c10::Device device) {
  return {window.dtype, device, window.sizes, window.strides};
}

}  // namespace

std::pair<int64_t, int64_t> bytes_of(const at::Tensor& tensor) {
  const auto size = static_cast<int64_t>(tensor.itemsize());
  const int64_t begin = tensor.storage_offset() * size;
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * size};
}

ValueType type_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.device(), tensor.sizes().vec(), tensor.strides().vec()};
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool shows_same_memory(const at::Tensor& first, const at::Tensor& second) {
  return first.defined() && second.defined() && same_storage(first, second) &&
         window_of(first) == window_of(second);
}

Node make_empty(ValueId value, const ValueType& type) {
  return {
      .op = "aten::empty_strided",
      .arguments = {Argument::of(c10::IValue(type.sizes)), Argument::of(c10::IValue(type.strides)),
                    Argument::of(c10::IValue(type.dtype)), Argument::of(c10::IValue()),
                    Argument::of(c10::IValue(type.device)), Argument::of(c10::IValue())},
      .results = {Argument::of(value)}};
}

Window window_of(const at::Tensor& tensor) {
  return {tensor.storage_offset(), tensor.sizes().vec(), tensor.strides().vec(),
          tensor.scalar_type(), tensor.is_conj()};
}

ValueId Memory::new_value(const at::Tensor& like) { return graph_.add_value(type_of(like)); }

Memory::Region* Memory::find(const at::Tensor& tensor) {
  return const_cast<Region*>(std::as_const(*this).find(tensor));
}

const Memory::Region* Memory::find(const at::Tensor& tensor) const {
  const auto block = blocks_.find(storage_of(tensor));
  if (block == blocks_.end()) return nullptr;
  const auto [begin, end] = bytes_of(tensor);
  for (const auto& region : block->second.regions) {
    if (begin >= region.begin && end <= region.end) return &region;
    const bool is_only_read = region.input != kNoInput && region.version == 0;
    if (begin < region.end && end > region.begin && !is_only_read)
      throw CannotRecord(c10::str("a tensor of sizes ", tensor.sizes(),
                                  " overlaps memory of which a part was written before it"));
  }
  return nullptr;
}

Memory::Region& Memory::add(const at::Tensor& tensor, ValueId value) {
  auto* storage = storage_of(tensor);
  auto [block, is_new] = blocks_.try_emplace(
      storage, Block{c10::weak_intrusive_ptr<c10::StorageImpl>(
                         c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
                     {}});
  const auto [begin, end] = bytes_of(tensor);
  auto& regions = block->second.regions;
  // An empty tensor may lie anywhere; of the others each has its place.
  std::erase_if(regions, [&](const Region& region) {
    return region.begin == region.end && begin <= region.begin && region.end <= end;
  });
  regions.push_back({.begin = begin,
                     .end = end,
                     .root = window_of(tensor),
                     .value = value,
                     .is_dense = tensor.is_non_overlapping_and_dense()});
  regions.back().entries[regions.back().root] = {value, 0};
  return regions.back();
}

Memory::Region& Memory::add_unseen(const at::Tensor& seen) {
  const bool is_parameter = seen.is_leaf() && seen.requires_grad();
  const bool is_part =
      !seen.is_non_overlapping_and_dense() && !is_parameter && !blocks_.contains(storage_of(seen));
  const auto tensor = by_ == Inputs::ByTensor ? seen
                      : is_parameter          ? as_shown(seen)
                      : is_part               ? storage_bytes(seen)
                                              : seen;
  const auto value = new_value(tensor);
  auto& region = add(tensor, value);
  if (tensor.numel() == 0) {
    graph_.nodes.push_back(make_empty(value, graph_.type(value)));
    return region;
  }
  region.input = static_cast<int>(inputs_.size());
  const bool is_constant = made_.contains(storage_of(tensor)->data_ptr().get());
  inputs_.push_back({value, tensor, is_constant});
  graph_.inputs.push_back({value, InputKind::Outside, ""});
  return region;
}

bool Memory::is_fresh(const at::Tensor& tensor) const {
  // An empty one may be resized by what writes it.
  return find(tensor) == nullptr &&
         (tensor.numel() == 0 || made_.contains(storage_of(tensor)->data_ptr().get()));
}

void Memory::before_write(const at::Tensor& tensor) {
  const auto* region = find(tensor);
  if (region == nullptr || region->input == kNoInput || region->version > 0) return;
  auto& input = inputs_[static_cast<size_t>(region->input)];
  if (input.is_constant && !input.content.defined()) input.content = copy_of(input.tensor);
}

bool Memory::knows(const at::Tensor& tensor) const { return find(tensor) != nullptr; }

std::optional<ValueId> Memory::find_current(const at::Tensor& tensor) const {
  const auto* region = find(tensor);
  if (region == nullptr) return std::nullopt;
  const auto entry = region->entries.find(window_of(tensor));
  if (entry == region->entries.end() || entry->second.version != region->version)
    return std::nullopt;
  return entry->second.value;
}

ValueId Memory::read(const at::Tensor& tensor) {
  auto* region = find(tensor);
  return read(region != nullptr ? *region : add_unseen(tensor), window_of(tensor));
}

ValueId Memory::read(Region& region, const Window& window) {
  const auto known = region.entries.find(window);
  if (known != region.entries.end() && known->second.version == region.version)
    return known->second.value;
  ValueId value = region.value;
  if (window != region.root) {
    if (known != region.entries.end() && known->second.origin) {
      value = repeat(region, *known->second.origin);
    } else {
      if (window.dtype != region.root.dtype || window.is_conjugate != region.root.is_conjugate)
        throw CannotRecord("memory is read as another dtype than it was made with, or conjugated");
      value = emit("tessera::window",
                   {Argument::of(region.value), Argument::of(c10::IValue(window.sizes)),
                    Argument::of(c10::IValue(window.strides)),
                    Argument::of(c10::IValue(window.offset - region.root.offset))},
                   type_of(window, graph_.type(region.value).device));
    }
  }
  auto& entry = region.entries[window];
  entry.value = value;
  entry.version = region.version;
  return value;
}

ValueId Memory::repeat(Region& region, const ViewOrigin& origin) {
  const auto parent = read(region, origin.parent);
  auto node = *origin.node;
  node.arguments[origin.argument] = Argument::of(parent);
  for (auto& result : node.results) {
    for (auto& value : result.values) {
      if (value != kNoValue) value = graph_.add_value(ValueType(graph_.type(value)));
    }
  }
  const auto value = node.results[origin.result].values[origin.position];
  graph_.nodes.push_back(std::move(node));
  return value;
}

ValueId Memory::emit(const char* op, std::vector<Argument> arguments, ValueType type) {
  const auto value = graph_.add_value(std::move(type));
  graph_.nodes.push_back(
      {.op = op, .arguments = std::move(arguments), .results = {Argument::of(value)}});
  return value;
}

void Memory::define(const at::Tensor& tensor, ValueId value) {
  if (auto* region = find(tensor)) {  // memory of an operator's making that was seen: a wait
    ++region->version;
    if (window_of(tensor) != region->root) throw CannotRecord("a part of memory is made anew");
    region->value = value;
    region->entries[region->root] = {value, region->version};
    return;
  }
  add(tensor, value);
}

void Memory::define_view(const at::Tensor& tensor, ValueId value, ViewOrigin origin) {
  auto* region = find(tensor);
  region->entries[window_of(tensor)] = {value, region->version, std::move(origin)};
}

/// Inputs may overlap as long as they are only read.
void Memory::check_alone(const c10::StorageImpl* storage, const Region& region) const {
  for (const auto& other : blocks_.at(storage).regions) {
    if (&other != &region && other.begin < region.end && region.begin < other.end)
      throw CannotRecord(c10::str("a tensor of sizes ", c10::IntArrayRef(region.root.sizes),
                                  " is written, and another that overlaps it is used as well"));
  }
}

void Memory::write(const at::Tensor& tensor, ValueId value) {
  auto* region = find(tensor);
  const auto window = window_of(tensor);
  if (region == nullptr) throw CannotRecord("a tensor got other memory while it was written");
  if (!region->is_dense)
    throw CannotRecord(c10::str("a tensor with gaps in its memory is written: sizes ",
                                c10::IntArrayRef(region->root.sizes), ", strides ",
                                c10::IntArrayRef(region->root.strides)));
  check_alone(storage_of(tensor), *region);
  if (window == region->root) {
    region->value = value;
  } else {
    if (window.dtype != region->root.dtype || window.is_conjugate != region->root.is_conjugate)
      throw CannotRecord("memory is written as another dtype than it was made with, or conjugated");
    region->value =
        emit("tessera::window_scatter",
             {Argument::of(region->value), Argument::of(value),
              Argument::of(c10::IValue(window.sizes)), Argument::of(c10::IValue(window.strides)),
              Argument::of(c10::IValue(window.offset - region->root.offset))},
             ValueType(graph_.type(region->value)));
  }
  ++region->version;
  if (window == region->root) region->entries[window] = {value, region->version};
}

std::optional<ValueId> Memory::written(size_t input) const {
  const auto* region = find(inputs_[input].tensor);
  if (region == nullptr)
    throw CannotRecord(c10::str("a tensor of sizes ", inputs_[input].tensor.sizes(),
                                " got other memory (set_data), which no operator shows"));
  if (region->version == 0) return std::nullopt;
  return region->value;
}

std::vector<LiveMemory> Memory::alive() const {
  std::vector<LiveMemory> alive;
  for (const auto& [address, block] : blocks_) {
    const bool is_ours = std::all_of(block.regions.begin(), block.regions.end(),
                                     [](const auto& region) { return region.input == kNoInput; });
    const auto storage = is_ours ? block.storage.lock() : c10::intrusive_ptr<c10::StorageImpl>();
    if (!storage) continue;
    for (const auto& region : block.regions) alive.push_back({storage, region.root, region.value});
  }
  std::sort(alive.begin(), alive.end(),
            [](const auto& first, const auto& second) { return first.value < second.value; });
  return alive;
}

}  // namespace tessera::compiler
