#pragma once

#include "dtensor/spec.h"

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

/// How a distributed tensor is made of a plain TensorImpl. See Note [what a distributed tensor is].
namespace tessera::dtensor {

// Note [what a distributed tensor is]
// A c10::TensorImpl with global sizes, no storage, the dispatch keys of PrivateUse3 and a
// BackendMeta, which holds the local tensor and the spec. No subclass: a parameter is held by the
// module's member and by its parameter list, so only changing the very TensorImpl turns it into a
// distributed one for everybody. Shallow copies (saved variables among them) share the meta.

inline constexpr auto kKey = c10::DispatchKey::PrivateUse3;

/// Who keeps copies of a part, or lets other ranks read its memory.
struct Owner {
  std::string name;  // for messages: "parameter 'weight' of Linear"
  /// Called before an operator writes to the part or to a view of it.
  std::function<void()> before_write;
  /// Called before the caller is given the memory itself, which it may read or write from then on.
  std::function<void()> before_expose;
};

/// What a rank holds of a distributed tensor.
class Part final : public c10::BackendMeta {
 public:
  Part(at::Tensor local, SpecPtr spec) : spec(std::move(spec)), local_(std::move(local)) {}
  /// A part that is on its way: `finish` waits and gives the local tensor.
  Part(std::function<at::Tensor()> finish, SpecPtr spec)
      : spec(std::move(spec)), finish_(std::move(finish)) {}

  c10::intrusive_ptr<BackendMeta> clone(
      const c10::intrusive_ptr<BackendMeta>& self) const override {
    return self;
  }

  const at::Tensor& local() {
    if (finish_) wait();
    return local_;
  }
  void set_local(at::Tensor local) { local_ = std::move(local); }

  const SpecPtr spec;
  /// A view that had to be moved: it has memory of its own, so what is written into it would not
  /// reach its base.
  bool is_lost_view = false;
  /// Whose it or its base is, if fully_shard has it. Views that aren't lost are its memory, too.
  std::shared_ptr<const Owner> owner;
  /// Of such a view: what counts the writes to its base, and how many there had been.
  c10::VariableVersion base_version;
  std::shared_ptr<uint32_t> base_writes;
  uint32_t seen_writes = 0;
  /// Of what such a view was taken from: writes, those through .data() among them, which autograd
  /// does not count.
  std::shared_ptr<uint32_t> writes;

 private:
  void wait();

  at::Tensor local_;
  std::function<at::Tensor()> finish_;
  std::mutex mutex_;
};

/// Whether a tensor is distributed.
inline bool has_part(const at::Tensor& tensor) {
  return tensor.defined() &&
         tensor.unsafeGetTensorImpl()->key_set().has_backend(c10::BackendComponent::PrivateUse3Bit);
}

/// Of a distributed tensor.
inline Part& part_of(const at::Tensor& tensor) {
  return *static_cast<Part*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

/// What this rank holds of a tensor: the tensor itself unless it is distributed.
inline at::Tensor local_part(const at::Tensor& tensor) {
  return has_part(tensor) ? part_of(tensor).local() : tensor;
}

/// A distributed tensor of these global sizes and strides.
at::Tensor wrap(at::Tensor local, const SpecPtr& spec, c10::IntArrayRef sizes,
                c10::IntArrayRef strides);
at::Tensor wrap(c10::intrusive_ptr<Part> part, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                caffe2::TypeMeta dtype, c10::Device device);

/// Turns a plain tensor into a distributed one, for everybody who holds it. Sizes and autograd
/// history (it is a leaf) stay; so does its gradient, which the caller converts.
void become_distributed(const at::Tensor& tensor, at::Tensor local, const SpecPtr& spec);

/// A part is what its memory holds, without a bit that says "conjugate" or "negative": formulas ask
/// the whole tensor for it, and collectives read the memory.
at::Tensor without_bits(const at::Tensor& tensor);

/// What the local tensor of a rank outside of the mesh is.
at::Tensor empty_local(const at::TensorOptions& options);

}  // namespace tessera::dtensor

/// Views whose parts had to be moved. See Note [lost views].
namespace tessera::dtensor {

// Note [lost views]
// A view of a distributed tensor is one of the parts wherever these stay where they are. Where they
// had to be moved it has memory of its own: what is written into it would not reach the base, and
// what is written to the base would not reach it. The first is refused; for the second a lost view
// remembers how often its base had been written to, and is refused once that has changed. Writes
// are counted by autograd's version counter, which views share, and by the part, which .data()
// shares.

/// Marks a view that an operator has made of `base`, which may be lost itself.
void mark_lost(const at::Tensor& view, const at::Tensor& base);

/// Of a distributed tensor: throws if it is a lost view, and what it was taken from has changed.
void refuse_stale(const char* caller, const Part& part);
inline void check_fresh(const char* caller, const at::Tensor& tensor) {
  if (const auto& part = part_of(tensor); part.is_lost_view) refuse_stale(caller, part);
}
/// Before it is written to: throws if it is a lost view, lets those taken from it know, and waits
/// for other ranks that may read the memory.
void begin_write(const char* caller, const at::Tensor& tensor);

}  // namespace tessera::dtensor

/// Parameters whose rows were put into another order when they were distributed. That can't be told
/// from the tensor, and whoever hands in whole values has to know.
namespace tessera::dtensor {

/// Of how many parts each of so many ranks has its share, one after the other.
struct PackedRows {
  int64_t parts = 1;  // 1: rows are in their own order
  int64_t ranks = 1;
};
PackedRows packed_rows(const at::Tensor& parameter);
int64_t packed_parts(const at::Tensor& parameter);
void remember_packed(const at::Tensor& parameter, PackedRows packed);

}  // namespace tessera::dtensor
