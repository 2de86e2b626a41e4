#include "fully_shard/source.h"

#include "base/devices.h"
#include "base/torch_versions.h"
#include "comm/group_memory.h"

#include <ATen/ATen.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

namespace tessera::detail::fully_shard {
namespace {

// Note [who may write]
// Shards of all ranks lie in one shared mapping, laid out as the whole parameters are, so whole
// tensors are views of it and a gather moves nothing: it is the gate `Written`, which every rank
// passes when it comes to a unit's forward, that is, after its own optimizer wrote its shards. In
// backward nobody has written since. The owner of a shard may write it when every rank has come to
// the gate `Read` as often as the owner itself: each does at the end of its forward, and of its
// backward, through the unit. Writes to distributed tensors ask for that (Source::before_write).

using Gate = comm::GroupMemory::Gate;

class AddressableSource final : public Source {
 public:
  AddressableSource(const std::vector<SourceParameter>& pieces, int rank,
                    const std::string& purpose, const Group& group) {
    Places places;
    std::vector<size_t> offsets;
    for (const auto& piece : pieces)
      offsets.push_back(piece.rows.is_split() ? places.add(piece.value.nbytes()) : 0);
    if (places.total() > 0 && group)
      memory_ = comm::make_group_memory(group, places.total(), purpose);
    for (size_t i = 0; i < pieces.size(); ++i) {
      place(pieces[i], offsets[i], rank);
      if (memory_ && pieces[i].rows.is_even())
        declared_.push_back(comm::declare_shared_part(
            shards_[i].const_data_ptr(),
            {memory_, group->getGroupName(), static_cast<uint8_t*>(homes_[i].mutable_data_ptr()),
             homes_[i].nbytes()}));
    }
    make_casts(pieces);
  }

  void start(Use use) override {
    if (memory_ && use == Use::Forward) {
      memory_->arrive(Gate::Written);
      awaits_writers_ = true;
    }
  }

  void finish() override {
    if (std::exchange(awaits_writers_, false)) memory_->await(Gate::Written);
    if (!casts_ || is_full_) return;
    casts_->fill();
    refresh_casts();
  }

  bool free() override {
    if (casts_) casts_->free();
    return true;
  }
  /// Other ranks write what this one sees.
  bool must_start(Use use, bool is_old) const override {
    return is_old || (memory_ && use == Use::Forward);
  }
  void compute_in_full(bool full) override {
    if (std::exchange(is_full_, full) != full) std::swap(unsharded_, others_);
  }
  size_t private_bytes() const override { return casts_ && !is_full_ ? casts_->bytes() : 0; }

  void end_use() override {
    if (memory_) memory_->arrive(Gate::Read);
  }
  void before_write() override {
    if (memory_) memory_->await(Gate::Read);
  }

 private:
  /// Puts this rank's part of a parameter's first value into its place.
  void place(const SourceParameter& piece, size_t offset, int rank) {
    const auto& value = piece.value;
    at::Tensor home;
    if (memory_ && piece.rows.is_split()) {
      home = at::for_blob(memory_->address() + offset, value.sizes())
                 .deleter([memory = memory_](void*) {})
                 .options(value.options())
                 .make_tensor();
      piece.rows.part(home, rank).copy_(piece.rows.part(value, rank));
    } else {
      home = value.detach().clone(at::MemoryFormat::Contiguous);
    }
    shards_.push_back(piece.rows.part(home, rank));
    homes_.push_back(std::move(home));
  }

  void make_casts(const std::vector<SourceParameter>& pieces) {
    Places places;
    std::vector<size_t> offsets;
    for (const auto& piece : pieces) {
      const bool is_cast = piece.compute_dtype != piece.value.scalar_type();
      const auto bytes =
          c10::elementSize(piece.compute_dtype) * static_cast<size_t>(piece.value.numel());
      offsets.push_back(is_cast ? places.add(bytes) : 0);
    }
    if (places.total() > 0)
      casts_ = std::make_unique<Buffer>(places.total(), pieces[0].value.device());
    for (size_t i = 0; i < pieces.size(); ++i) {
      const bool is_cast = pieces[i].compute_dtype != pieces[i].value.scalar_type();
      unsharded_.push_back(
          is_cast ? casts_->view(offsets[i], pieces[i].value.sizes(), pieces[i].compute_dtype)
                  : homes_[i]);
    }
    others_ = homes_;
  }

  void refresh_casts() {
    for (size_t i = 0; i < unsharded_.size(); ++i) {
      if (!unsharded_[i].is_same(homes_[i])) unsharded_[i].copy_(homes_[i]);
    }
  }

  std::shared_ptr<comm::GroupMemory> memory_;
  std::vector<std::shared_ptr<void>> declared_;  // shards, to compiled programs
  bool awaits_writers_ = false;
  bool is_full_ = false;
  std::vector<at::Tensor> homes_;   // whole, in the parameters' own dtypes
  std::vector<at::Tensor> others_;  // what unsharded_ are if is_full_ changes
  std::unique_ptr<Buffer> casts_;   // whole, in those of computation where they differ
};

}  // namespace

std::unique_ptr<Source> make_addressable_source(std::vector<SourceParameter> pieces, int rank,
                                                const std::string& purpose, const Group& group) {
  return std::make_unique<AddressableSource>(pieces, rank, purpose, group);
}

namespace {

constexpr size_t kLine = 64;
constexpr const char* kFreed =
    "fully_shard: this memory held gathered parameters and was freed when their unit was sharded "
    "again; keep no views of parameters across the end of a unit's forward, or set "
    "reshard_after_forward = false";

}  // namespace

Buffer::Buffer(size_t bytes, c10::Device device)
    : bytes_(bytes),
      device_(device),
      storage_(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
               c10::GetAllocator(device.type()), /*resizable=*/true) {
  free();
}

void Buffer::fill() {
  if (is_filled_) return;
  auto* storage = storage_.unsafeGetStorageImpl();
  allow_access(*storage);
  const c10::DeviceGuard guard(device_);  // allocators ask for the current one
  storage->set_data_ptr_noswap(c10::GetAllocator(device_.type())->allocate(bytes_));
  storage->set_nbytes(bytes_);
  is_filled_ = true;
}

// Kernels may still be queued that read it.
void Buffer::keep_for_current_stream() const {
  if (device_.is_cpu() || !is_filled_) return;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  guard.recordDataPtrOnStream(storage_.data_ptr(), current_stream(device_));
}

void Buffer::free() {
  keep_for_current_stream();
  auto* storage = storage_.unsafeGetStorageImpl();
  if (is_filled_) storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  storage->set_nbytes(0);
  refuse_access(*storage, kFreed);
  is_filled_ = false;
}

at::Tensor Buffer::view(size_t offset, c10::IntArrayRef sizes, at::ScalarType dtype) const {
  auto tensor = at::empty({0}, at::TensorOptions(dtype).device(device_));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage_);
  impl->set_sizes_contiguous(sizes);
  impl->set_storage_offset(static_cast<int64_t>(offset / c10::elementSize(dtype)));
  return tensor;
}

size_t Places::add(size_t bytes) {
  const auto offset = total_;
  total_ += (bytes + kLine - 1) / kLine * kLine;
  return offset;
}

}  // namespace tessera::detail::fully_shard
