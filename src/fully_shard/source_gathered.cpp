#include "fully_shard/shard_layout.h"
#include "fully_shard/source.h"
#include "fully_shard/streams.h"

#include <ATen/ATen.h>

#include <map>

namespace tessera::detail::fully_shard {
namespace {

struct UnshardedValues;

/// How parts of all parameters travel over one group.
struct Route {
  c10::intrusive_ptr<c10d::Backend> backend;
  int64_t rank;
  int64_t ranks;
  std::vector<ShardLayout> rows;
  std::map<const UnshardedValues*, std::vector<Packing>> packings;  // by what is made of them

  Route(const std::vector<SourceParameter>& pieces, const Group& group, c10::Device device)
      : backend(group->getBackend(device.type())), rank(group->getRank()), ranks(group->getSize()) {
    for (const auto& piece : pieces)
      rows.emplace_back(piece.rows.sizes(), ranks, piece.rows.is_split(), piece.shard_dim);
  }
};

/// Whole parameters in one set of dtypes.
struct UnshardedValues {
  std::vector<at::ScalarType> dtypes;
  std::unique_ptr<Buffer> buffer;
  std::vector<at::Tensor> tensors;

  UnshardedValues(const std::vector<ShardLayout>& rows, std::vector<at::ScalarType> given,
                  c10::Device device)
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
  GatheredSource(const std::vector<SourceParameter>& pieces, const GatherSettings& settings)
      : device_(settings.device), is_on_host_(settings.on_cpu) {
    if (settings.group) all_.emplace(pieces, settings.group, device_);
    if (settings.neighbours) near_.emplace(pieces, settings.neighbours, device_);
    std::vector<at::ScalarType> dtypes;
    for (const auto& piece : pieces) {
      rows_.push_back(piece.rows);
      dtypes.push_back(piece.compute_dtype);
      own_dtypes_.push_back(piece.value.scalar_type());
      const auto part = piece.rows.part(piece.value.detach(), all_ ? all_->rank : 0);
      shards_.push_back(is_on_host_ ? part.contiguous().cpu().pin_memory()
                                    : part.clone(at::MemoryFormat::Contiguous));
    }
    low_ = std::make_unique<UnshardedValues>(rows_, std::move(dtypes), device_);
    now_ = low_.get();
    unsharded_ = now_->tensors;
  }

  ~GatheredSource() override { abandon(); }

  // See Note [streams of fully_shard].
  void start(Use use) override {
    const bool is_near = use == Use::Backward && !kept_.empty();
    const bool is_brought = is_on_host_ && !is_near;
    abandon();
    from_ = is_near ? &*near_ : all_ ? &*all_ : nullptr;
    now_->buffer->fill();
    parts_ = is_near ? kept_ : shards_;
    for (size_t i = 0; i < parts_.size() && is_brought; ++i) parts_[i] = room_on_device(i);
    Copies copies;
    if (from_ != nullptr)
      make_messages(copies);
    else
      for (size_t i = 0; i < parts_.size(); ++i) copies.add(unsharded_[i], parts_[i]);

    const OnSide side(Side::Gather, device_);
    for (size_t i = 0; i < parts_.size() && is_brought; ++i)
      parts_[i].copy_(shards_[i], /*non_blocking=*/true);
    if (is_brought) read_ = side.record();
    for (const auto& row : sent_rows_) row.zero_();
    copy_all(copies);
    if (from_ != nullptr)
      work_ = from_->backend->allgather_into_tensor_coalesced(outputs_, sent_);
    else
      ready_ = side.record();
  }

  void finish() override {
    if (work_) work_->wait();
    work_.reset();
    if (ready_) wait_for(*ready_, device_);
    ready_.reset();
    Copies copies;
    for (size_t i = 0; i < packed_.size(); ++i) {
      if (packed_[i].defined()) unpack(from_->packings[now_][i], packed_[i], copies);
    }
    copy_all(copies);
    // It may have begun on another stream.
    for (const auto* tensors : {&parts_, &sent_, &packed_}) keep_for_current_stream(*tensors);
    forget();
    if (from_ != nullptr && near_ && from_ == &*near_) kept_.clear();
    now_->buffer->keep_for_current_stream();  // backward may compute on another
  }

  bool free() override {
    now_->buffer->free();
    return true;
  }

  void keep_part() override {
    if (!near_) return;
    kept_.clear();
    for (size_t i = 0; i < unsharded_.size(); ++i)
      kept_.push_back(
          near_->rows[i].part(unsharded_[i], near_->rank).clone(at::MemoryFormat::Contiguous));
  }

  void compute_in_full(bool full) override {
    if (full && !full_) full_ = std::make_unique<UnshardedValues>(rows_, own_dtypes_, device_);
    now_ = full ? full_.get() : low_.get();
    unsharded_ = now_->tensors;
    kept_.clear();
  }

  bool works_in_background() const override { return true; }
  size_t private_bytes() const override { return now_->buffer->bytes(); }
  size_t kept_bytes() const override {
    size_t bytes = 0;
    for (const auto& part : kept_) bytes += part.nbytes();
    return bytes;
  }

  void before_write() override {
    if (read_) read_->synchronize();
    read_.reset();
  }

 private:
  struct Copies {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;

    void add(const at::Tensor& target, const at::Tensor& source) {
      if (target.numel() == 0 || target.is_same(source)) return;
      to.push_back(target);
      from.push_back(source);
    }
  };

  void forget() {
    for (auto* tensors : {&parts_, &sent_, &sent_rows_, &outputs_, &packed_}) tensors->clear();
  }

  /// What start() began and nobody finished, for an exception: its memory is freed after its use.
  void abandon() noexcept {
    if (!parts_.empty() && !device_.is_cpu()) {
      try {
        if (work_) work_->wait();
      } catch (...) {  // told when it was first waited for, or of no use to anybody
      }
      try {
        const auto gathered = OnSide(Side::Gather, device_).record();
        wait_for(*gathered, device_);
        for (const auto* tensors : {&parts_, &sent_, &packed_}) keep_for_current_stream(*tensors);
        now_->buffer->keep_for_current_stream();
      } catch (...) {  // the device has failed
      }
    }
    work_.reset();
    ready_.reset();
    forget();
  }

  /// Where a shard of the host's memory lies on the device: at once where it is used, if it can.
  at::Tensor room_on_device(size_t index) const {
    const auto& shard = shards_[index];
    const bool is_whole =
        from_ == nullptr && shard.scalar_type() == unsharded_[index].scalar_type();
    return is_whole ? unsharded_[index] : at::empty_like(shard, shard.options().device(device_));
  }

  /// Room for what is sent and received, and what is to be copied there.
  void make_messages(Copies& copies) {
    auto& packings = from_->packings[now_];
    if (packings.empty()) packings = pack(from_->rows, now_->dtypes, from_->ranks, device_);
    for (const auto& packing : packings) {
      const auto options = at::TensorOptions(packing.dtype()).device(device_);
      for (const size_t i : packing.alone()) {
        const bool is_cast = parts_[i].scalar_type() != packing.dtype();
        sent_.push_back(is_cast ? at::empty_like(parts_[i], options) : parts_[i]);
        copies.add(sent_.back(), parts_[i]);
        outputs_.push_back(unsharded_[i]);
      }
      packed_.emplace_back();
      if (!packing.has_rows()) continue;
      const auto row = at::empty({packing.row_numel()}, options);
      for (size_t i = 0; i < packing.packed().size(); ++i) {
        const auto& part = parts_[packing.packed()[i]];
        if (part.numel() > 0) copies.add(packing.slot(row, i, from_->rank), part);
      }
      sent_.push_back(row);
      sent_rows_.push_back(row);
      packed_.back() = at::empty({from_->ranks * packing.row_numel()}, options);
      outputs_.push_back(packed_.back());
    }
  }

  /// Where the parts in `rows` belong.
  void unpack(const Packing& packing, const at::Tensor& rows, Copies& copies) const {
    for (int64_t rank = 0; rank < from_->ranks; ++rank) {
      const auto row = rows.narrow(0, rank * packing.row_numel(), packing.row_numel());
      for (size_t i = 0; i < packing.packed().size(); ++i) {
        const size_t member = packing.packed()[i];
        const auto& of = from_->rows[member];
        if (!of.is_split() && rank != from_->rank) continue;
        const auto part = of.part(unsharded_[member], rank);
        if (part.numel() > 0) copies.add(part, packing.slot(row, i, rank));
      }
    }
  }

  /// On a device in few kernels.
  void copy_all(Copies& copies) const {
    if (copies.to.empty()) return;
    if (!device_.is_cpu()) return at::_foreach_copy_(copies.to, copies.from);
    for (size_t i = 0; i < copies.to.size(); ++i) copies.to[i].copy_(copies.from[i]);
  }

  c10::Device device_;
  bool is_on_host_;  // the shards
  std::vector<ShardLayout> rows_;
  std::vector<at::ScalarType> own_dtypes_;
  std::optional<Route> all_;   // none: this rank has all
  std::optional<Route> near_;  // of what is kept between forward and backward
  std::vector<at::Tensor> kept_;
  std::unique_ptr<UnshardedValues> low_;
  std::unique_ptr<UnshardedValues> full_;  // made when first asked for
  UnshardedValues* now_;
  Route* from_ = nullptr;  // on which parameters are, or came last
  // From start() to finish():
  std::vector<at::Tensor> parts_;      // this rank's, on the device
  std::vector<at::Tensor> sent_;       // those that are sent as they are, and rows of others
  std::vector<at::Tensor> sent_rows_;  // the rows alone
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> packed_;  // rows of all ranks, by packing
  c10::intrusive_ptr<c10d::Work> work_;
  std::optional<c10::Event> ready_;  // without a group: when parameters are whole
  std::optional<c10::Event> read_;   // when the host's shards were, last
};

}  // namespace

std::unique_ptr<Source> make_gathered_source(const std::vector<SourceParameter>& pieces,
                                             const GatherSettings& settings) {
  return std::make_unique<GatheredSource>(pieces, settings);
}

}  // namespace tessera::detail::fully_shard
