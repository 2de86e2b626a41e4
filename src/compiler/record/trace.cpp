#include "compiler/record/trace.h"

#include "base/torch_versions.h"
#include "compiler/ir/difference.h"
#include "compiler/ir/operators.h"
#include "compiler/record/dispatch_key.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

bool same(const RecordedCall& first, const RecordedCall& second) {
  return first.op == second.op && first.bucket_caps == second.bucket_caps &&
         std::equal(first.arguments.begin(), first.arguments.end(), second.arguments.begin(),
                    second.arguments.end(), same_argument);
}

/// The argument that a return of the schema hands back; none if it is the operator's own.
std::optional<size_t> handed_back(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr || !alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* given = schema.arguments()[i].alias_info();
    if (given != nullptr && given->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

c10::IValue fake_result(const c10::Argument& declared,
                        const std::vector<std::optional<ValueType>>& types) {
  const auto make = [](const std::optional<ValueType>& type) {
    return type ? make_fake(*type) : at::Tensor();
  };
  if (declared.type()->kind() != c10::TypeKind::ListType) return make(types.at(0));
  std::vector<at::Tensor> list;
  for (const auto& type : types) list.push_back(make(type));
  return list;
}

}  // namespace

bool Trace::is_same(const Trace& other) const {
  if (graph.value_count() != other.graph.value_count() || alive != other.alive) return false;
  for (size_t i = 0; i < graph.value_count(); ++i) {
    const auto value = static_cast<ValueId>(i);
    if (graph.type(value) != other.graph.type(value)) return false;
  }
  return std::equal(calls.begin(), calls.end(), other.calls.begin(), other.calls.end(),
                    [](const auto& left, const auto& right) { return same(left, right); });
}

bool TraceMatcher::matches(const Trace& trace, const RecordedCall& call) const {
  if (next_ >= trace.calls.size() || graph_->value_count() > trace.graph.value_count())
    return false;
  // What it reads for the first time has the same sizes.
  for (size_t i = checked_; i < graph_->value_count(); ++i) {
    const auto value = static_cast<ValueId>(i);
    if (graph_->type(value) != trace.graph.type(value)) return false;
  }
  return same(trace.calls[next_], call);
}

bool TraceMatcher::serve(const c10::OperatorHandle& op, const RecordedCall& call,
                         torch::jit::Stack& stack) {
  std::erase_if(traces_, [&](const Trace* trace) { return !matches(*trace, call); });
  if (traces_.empty()) return false;
  const auto& known = traces_.front()->calls[next_++];
  checked_ = graph_->value_count();
  const auto& schema = op.schema();
  const size_t base = stack.size() - schema.arguments().size();
  if (is_wait(known.op)) return true;  // the argument is the result
  if (known.gave_view) {               // a view touches no memory
    const RunScope run;
    op.callBoxed(stack);
    return true;
  }
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto given = handed_back(schema, i);
    results.push_back(given ? stack[base + *given]
                            : fake_result(schema.returns()[i], known.results.at(i)));
  }
  stack.resize(base);
  for (auto& result : results) stack.push_back(std::move(result));
  return true;
}

void TraceMatcher::stop() {
  is_matching_ = false;
  stopped_();
}

const Trace* TraceMatcher::completed(const std::vector<LiveMemory>& alive) const {
  for (const auto* trace : traces_) {
    if (trace->calls.size() != next_ || trace->alive.size() != alive.size()) continue;
    if (std::equal(alive.begin(), alive.end(), trace->alive.begin(),
                   [](const auto& held, ValueId value) { return held.value == value; }))
      return trace;
  }
  return nullptr;
}

namespace {

constexpr const char* kNoMemory =
    "compile: a tensor of a compiled forward or backward was read while it was not computed yet. "
    "Expected operators of the dispatcher alone; what reads memory directly, such as data_ptr() in "
    "a function of autograd, must stay outside of compile(module) and CompiledBackward";

int64_t bytes_until_end(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                        int64_t offset, size_t item) {
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return (last + 1) * static_cast<int64_t>(item);
}

/// Memory of a tensor, which lives as long as it is used.
at::DataPtr shared_memory(const at::Tensor& owner) {
  return {owner.unsafeGetTensorImpl()->mutable_data(), new at::Tensor(owner),
          [](void* held) { delete static_cast<at::Tensor*>(held); }, owner.device()};
}

bool shows_alike(const at::Tensor& value, const Window& root) {
  if (value.scalar_type() != root.dtype || value.sizes() != root.sizes) return false;
  for (size_t i = 0; i < root.sizes.size(); ++i) {
    if (root.sizes[i] > 1 && value.strides()[i] != root.strides[i]) return false;
  }
  return true;
}

}  // namespace

at::Tensor make_fake(const ValueType& type) {
  const auto bytes = bytes_until_end(type.sizes, type.strides, 0, c10::elementSize(type.dtype));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       at::DataPtr(nullptr, type.device),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  if (bytes > 0) refuse_access(*storage, kNoMemory);
  const auto key = c10::computeDispatchKey(type.dtype, at::kStrided, type.device);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(key),
                                                         c10::scalarTypeToTypeMeta(type.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(type.sizes, type.strides);
  return tensor;
}

void give_contents(const LiveMemory& memory, const at::Tensor& value) {
  const auto& root = memory.root;
  auto& storage = *memory.storage;
  allow_access(storage);
  if (value.numel() == 0) return;
  if (storage.data_ptr().get() != nullptr) {  // made by means that the recorder does not see
    at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory.storage), value.key_set(),
                                             value.dtype())
        .as_strided(root.sizes, root.strides, root.offset)
        .copy_(value);
    return;
  }
  at::Tensor contents = value;
  if (!shows_alike(value, root) || !value.is_non_overlapping_and_dense()) {
    contents = at::empty_strided(root.sizes, root.strides, value.options().dtype(root.dtype));
    contents.copy_(value);
  }
  storage.set_data_ptr_noswap(shared_memory(contents));
}

}  // namespace tessera::compiler
