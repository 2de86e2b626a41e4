#include "fully_shard/buffer.h"
#include "fully_shard/packing.h"
#include "fully_shard/source.h"

#include <ATen/ATen.h>

namespace tessera::sharded {
namespace {

class GatheredSource final : public Source {
 public:
  GatheredSource(const std::vector<Piece>& pieces, const Group& group)
      : backend_(group->getBackend(pieces[0].value.device().type())),
        rank_(group->getRank()),
        ranks_(group->getSize()) {
    Places places;
    std::vector<size_t> offsets;
    std::vector<at::ScalarType> dtypes;
    for (const auto& piece : pieces) {
      rows_.push_back(piece.rows);
      dtypes.push_back(piece.compute_dtype);
      offsets.push_back(places.add(c10::elementSize(piece.compute_dtype) *
                                   static_cast<size_t>(piece.value.numel())));
      shards_.push_back(
          piece.rows.part(piece.value.detach(), rank_).clone(at::MemoryFormat::Contiguous));
    }
    buffer_ = std::make_unique<Buffer>(places.total(), pieces[0].value.device());
    for (size_t i = 0; i < pieces.size(); ++i)
      wholes_.push_back(buffer_->view(offsets[i], pieces[i].value.sizes(), dtypes[i]));
    packings_ = pack(rows_, dtypes, ranks_);
  }

  void start(Use) override {
    buffer_->fill();
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    packed_.clear();
    for (const auto& packing : packings_) {
      for (const size_t i : packing.alone()) {
        inputs.push_back(shards_[i].to(packing.dtype()));
        outputs.push_back(wholes_[i]);
      }
      packed_.emplace_back();
      if (!packing.has_rows()) continue;
      inputs.push_back(pack_shards(packing));
      packed_.back() = at::empty({ranks_ * packing.row_numel()}, inputs.back().options());
      outputs.push_back(packed_.back());
    }
    work_ = backend_->allgather_into_tensor_coalesced(outputs, inputs);
  }

  void finish() override {
    if (work_) work_->wait();
    work_.reset();
    for (size_t i = 0; i < packed_.size(); ++i) {
      if (packed_[i].defined()) unpack(packings_[i], packed_[i]);
    }
    packed_.clear();
  }

  void free() override { buffer_->free(); }
  bool works_in_background() const override { return true; }
  size_t private_bytes() const override { return buffer_->bytes(); }

 private:
  at::Tensor pack_shards(const Packing& packing) const {
    auto row = at::zeros({packing.row_numel()}, wholes_[0].options().dtype(packing.dtype()));
    for (size_t i = 0; i < packing.packed().size(); ++i)
      packing.slot(row, i, rank_).copy_(shards_[packing.packed()[i]]);
    return row;
  }

  void unpack(const Packing& packing, const at::Tensor& rows) {
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      const auto row = rows.narrow(0, rank * packing.row_numel(), packing.row_numel());
      for (size_t i = 0; i < packing.packed().size(); ++i) {
        const size_t member = packing.packed()[i];
        if (rows_[member].is_split() || rank == rank_)
          rows_[member].part(wholes_[member], rank).copy_(packing.slot(row, i, rank));
      }
    }
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  int64_t rank_;
  int64_t ranks_;
  std::vector<Rows> rows_;
  std::vector<Packing> packings_;
  std::unique_ptr<Buffer> buffer_;
  std::vector<at::Tensor> packed_;  // on their way, by packing
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

std::unique_ptr<Source> make_gathered_source(std::vector<Piece> pieces, const Group& group) {
  return std::make_unique<GatheredSource>(pieces, group);
}

}  // namespace tessera::sharded
