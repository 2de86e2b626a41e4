#pragma once

#include <tessera/compile/graph.h>

#include "compiler/record/allocations.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace tessera::compiler {

/// Why a recording can't be made, and what to do about it; the operators run all the same.
struct CannotRecord : std::runtime_error {
  explicit CannotRecord(const std::string& why, std::string what = {})
      : std::runtime_error(why), remedy(std::move(what)) {}
  std::string remedy;  // follows the place in a message
};

/// Where a tensor lies in its storage.
struct Window {
  int64_t offset;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool is_conjugate = false;  // shows the conjugates of what lies there

  auto operator<=>(const Window&) const = default;
};
Window window_of(const at::Tensor& tensor);
c10::StorageImpl* storage_of(const at::Tensor& tensor);
ValueType type_of(const at::Tensor& tensor);
/// From where to where in its storage, in bytes.
std::pair<int64_t, int64_t> bytes_of(const at::Tensor& tensor);
/// Whether both show the same memory in the same way.
bool shows_same_memory(const at::Tensor& first, const at::Tensor& second);
/// A node that makes a tensor of this type, whose content is not defined.
Node make_empty(ValueId value, const ValueType& type);

/// How a tensor was made of another one that shares its memory.
struct ViewOrigin {
  std::shared_ptr<const Node> node;
  size_t argument;  // of the node: the other tensor
  Window parent;
  size_t result, position;  // among the node's results
};

/// A tensor that was there before the recording, or a constant that the recorded function made.
struct RecordedInput {
  ValueId value;
  at::Tensor tensor;
  bool is_constant;
  at::Tensor content = {};  // of a constant that the function writes: what it held before
};

/// Memory that the recorded function made, and that somebody holds.
struct LiveMemory {
  c10::intrusive_ptr<c10::StorageImpl> storage;
  Window root;
  ValueId value;
};

/// What becomes an input when a tensor with gaps is seen first, such as every other row of another.
enum class Inputs {
  ByTensor,   // the tensor
  ByStorage,  // all of its storage, of which other tensors may show the rest
};

/// Turns tensors, whose memory is shared and written, into values, which never change.
///
/// Note [values of memory]: a region is memory of which one tensor, the root, was seen first. Its
/// content is the root's value. A view's value is made by repeating the view on what the root holds
/// now; a write through a view makes a new value of the root. Tensors are known by storage, offset,
/// sizes and strides, not by TensorImpl: autograd hands out what it saved as new impls.
class Memory {
 public:
  Memory(Graph& graph, const Allocations& made, Inputs by) : graph_(graph), made_(made), by_(by) {}

  /// The value that the tensor holds; one whose memory nobody has seen becomes an input.
  ValueId read(const at::Tensor& tensor);
  /// Whether the recorded function allocated it, and nothing was seen of it yet.
  bool is_fresh(const at::Tensor& tensor) const;
  bool knows(const at::Tensor& tensor) const;
  /// The value of a tensor seen before, if nothing was written to its memory since.
  std::optional<ValueId> find_current(const at::Tensor& tensor) const;

  /// An operator is about to write it.
  void before_write(const at::Tensor& tensor);

  /// A tensor with memory of its own.
  void define(const at::Tensor& tensor, ValueId value);
  /// A tensor in memory that is known.
  void define_view(const at::Tensor& tensor, ValueId value, ViewOrigin origin);
  /// The tensor was written and holds `value`.
  void write(const at::Tensor& tensor, ValueId value);

  const std::vector<RecordedInput>& inputs() const { return inputs_; }
  /// Of an input: what it holds at the end, if it was written.
  std::optional<ValueId> written(size_t input) const;
  /// Memory of the recorded function that somebody still holds, in the order of its values.
  std::vector<LiveMemory> alive() const;

  ValueId new_value(const at::Tensor& like);
  void clear() {
    blocks_.clear();
    inputs_.clear();
  }

 private:
  static constexpr int kNoInput = -1;
  struct Entry {
    ValueId value;
    int64_t version;
    std::optional<ViewOrigin> origin = std::nullopt;
  };
  struct Region {
    int64_t begin, end;  // bytes of the storage
    Window root;
    ValueId value;
    int64_t version = 0;
    int input = kNoInput;
    bool is_dense;
    std::map<Window, Entry> entries = {};
  };
  struct Block {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // so that its address is not used again
    std::vector<Region> regions;
  };

  Region* find(const at::Tensor& tensor);
  const Region* find(const at::Tensor& tensor) const;
  Region& add(const at::Tensor& tensor, ValueId value);
  Region& add_unseen(const at::Tensor& tensor);
  ValueId read(Region& region, const Window& window);
  ValueId repeat(Region& region, const ViewOrigin& origin);
  void check_alone(const c10::StorageImpl* storage, const Region& region) const;
  ValueId emit(const char* op, std::vector<Argument> arguments, ValueType type);

  Graph& graph_;
  const Allocations& made_;
  const Inputs by_;
  std::unordered_map<const c10::StorageImpl*, Block> blocks_;
  std::vector<RecordedInput> inputs_;
};

}  // namespace tessera::compiler
