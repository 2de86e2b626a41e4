#include "fully_shard/buffer.h"
#include "fully_shard/packing.h"
#include "fully_shard/source.h"

#include <ATen/ATen.h>

#include <map>

namespace tessera::sharded {
namespace {

struct Wholes;

/// How parts of all parameters travel over one group.
struct Way {
  c10::intrusive_ptr<c10d::Backend> backend;
  int64_t rank;
  int64_t ranks;
  std::vector<Rows> rows;
  std::map<const Wholes*, std::vector<Packing>> packings;  // by what is made of them

  Way(const std::vector<Piece>& pieces, const Group& group, c10::Device device)
      : backend(group->getBackend(device.type())), rank(group->getRank()), ranks(group->getSize()) {
    for (const auto& piece : pieces)
      rows.emplace_back(piece.rows.sizes(), ranks, piece.rows.is_split(), piece.shard_dim);
  }
};

/// Whole parameters in one set of dtypes.
struct Wholes {
  std::vector<at::ScalarType> dtypes;
  std::unique_ptr<Buffer> buffer;
  std::vector<at::Tensor> tensors;

  Wholes(const std::vector<Rows>& rows, std::vector<at::ScalarType> given, c10::Device device)
      : dtypes(std::move(given)) {
    Places places;
    std::vector<size_t> offsets;
    for (size_t i = 0; i < rows.size(); ++i)
      offsets.push_back(
          places.add(c10::elementSize(dtypes[i]) * static_cast<size_t>(rows[i].numel())));
    buffer = std::make_unique<Buffer>(places.total(), device);
    for (size_t i = 0; i < rows.size(); ++i)
      tensors.push_back(buffer->view(offsets[i], rows[i].sizes(), dtypes[i]));
  }
};

class GatheredSource final : public Source {
 public:
  GatheredSource(const std::vector<Piece>& pieces, const GatherSettings& settings)
      : device_(settings.device) {
    if (settings.group) all_.emplace(pieces, settings.group, device_);
    if (settings.neighbours) near_.emplace(pieces, settings.neighbours, device_);
    std::vector<at::ScalarType> dtypes;
    for (const auto& piece : pieces) {
      rows_.push_back(piece.rows);
      dtypes.push_back(piece.compute_dtype);
      own_dtypes_.push_back(piece.value.scalar_type());
      const auto part = piece.rows.part(piece.value.detach(), all_ ? all_->rank : 0);
      auto shard = settings.on_cpu ? part.cpu() : part;
      if (shard.is_same(part) || !shard.is_contiguous())
        shard = shard.clone(at::MemoryFormat::Contiguous);
      shards_.push_back(settings.on_cpu && !device_.is_cpu() ? shard.pin_memory() : shard);
    }
    low_ = std::make_unique<Wholes>(rows_, std::move(dtypes), device_);
    now_ = low_.get();
    wholes_ = now_->tensors;
  }

  // Copies from the CPU's memory are waited for: an optimizer may write there next.
  void start(Use use) override {
    const bool is_near = use == Use::Backward && !kept_.empty();
    from_ = is_near ? &*near_ : all_ ? &*all_ : nullptr;
    const auto& parts = is_near ? kept_ : shards_;
    now_->buffer->fill();
    if (from_ != nullptr) return send(parts);
    for (size_t i = 0; i < parts.size(); ++i) wholes_[i].copy_(parts[i]);
  }

  void finish() override {
    if (work_) work_->wait();
    work_.reset();
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
    for (size_t i = 0; i < packed_.size(); ++i) {
      if (packed_[i].defined()) unpack(from_->packings[now_][i], packed_[i], to, from);
    }
    copy_all(to, from);
    packed_.clear();
    if (from_ != nullptr && near_ && from_ == &*near_) kept_.clear();
    now_->buffer->keep_for_current_stream();  // backward may compute on another
  }

  void free() override { now_->buffer->free(); }

  void keep_part() override {
    if (!near_) return;
    kept_.clear();
    for (size_t i = 0; i < wholes_.size(); ++i)
      kept_.push_back(
          near_->rows[i].part(wholes_[i], near_->rank).clone(at::MemoryFormat::Contiguous));
  }

  void compute_in_full(bool full) override {
    if (full && !full_) full_ = std::make_unique<Wholes>(rows_, own_dtypes_, device_);
    now_ = full ? full_.get() : low_.get();
    wholes_ = now_->tensors;
    kept_.clear();
  }

  bool works_in_background() const override { return true; }
  size_t private_bytes() const override { return now_->buffer->bytes(); }
  size_t kept_bytes() const override {
    size_t bytes = 0;
    for (const auto& part : kept_) bytes += part.nbytes();
    return bytes;
  }

 private:
  void send(const std::vector<at::Tensor>& parts) {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    auto& packings = from_->packings[now_];
    if (packings.empty()) packings = pack(from_->rows, now_->dtypes, from_->ranks);
    packed_.clear();
    for (const auto& packing : packings) {
      for (const size_t i : packing.alone()) {
        inputs.push_back(parts[i].to(device_, packing.dtype()));
        outputs.push_back(wholes_[i]);
      }
      packed_.emplace_back();
      if (!packing.has_rows()) continue;
      inputs.push_back(pack_parts(packing, parts));
      packed_.back() = at::empty({from_->ranks * packing.row_numel()}, inputs.back().options());
      outputs.push_back(packed_.back());
    }
    work_ = from_->backend->allgather_into_tensor_coalesced(outputs, inputs);
  }

  at::Tensor pack_parts(const Packing& packing, const std::vector<at::Tensor>& parts) const {
    auto row = at::zeros({packing.row_numel()}, at::TensorOptions(packing.dtype()).device(device_));
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
    for (size_t i = 0; i < packing.packed().size(); ++i) {
      const auto& part = parts[packing.packed()[i]];
      if (part.numel() == 0) continue;
      to.push_back(packing.slot(row, i, from_->rank));
      from.push_back(part);
    }
    copy_all(to, from);
    return row;
  }

  /// Where the parts in `rows` belong.
  void unpack(const Packing& packing, const at::Tensor& rows, std::vector<at::Tensor>& to,
              std::vector<at::Tensor>& from) const {
    for (int64_t rank = 0; rank < from_->ranks; ++rank) {
      const auto row = rows.narrow(0, rank * packing.row_numel(), packing.row_numel());
      for (size_t i = 0; i < packing.packed().size(); ++i) {
        const size_t member = packing.packed()[i];
        const auto& of = from_->rows[member];
        if (!of.is_split() && rank != from_->rank) continue;
        auto part = of.part(wholes_[member], rank);
        if (part.numel() == 0) continue;
        to.push_back(std::move(part));
        from.push_back(packing.slot(row, i, rank));
      }
    }
  }

  /// On a device in few kernels.
  void copy_all(std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) const {
    const bool is_host_involved =
        device_.is_cpu() || (!from.empty() && from.front().device() != device_);
    if (!to.empty() && !is_host_involved) return at::_foreach_copy_(to, from);
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
  }

  c10::Device device_;
  std::vector<Rows> rows_;
  std::vector<at::ScalarType> own_dtypes_;
  std::optional<Way> all_;   // none: this rank has all
  std::optional<Way> near_;  // of what is kept between forward and backward
  std::vector<at::Tensor> kept_;
  std::unique_ptr<Wholes> low_;
  std::unique_ptr<Wholes> full_;  // made when first asked for
  Wholes* now_;
  Way* from_ = nullptr;             // on which parameters are, or came last
  std::vector<at::Tensor> packed_;  // on their way, by packing
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

std::unique_ptr<Source> make_gathered_source(const std::vector<Piece>& pieces,
                                             const GatherSettings& settings) {
  return std::make_unique<GatheredSource>(pieces, settings);
}

}  // namespace tessera::sharded
