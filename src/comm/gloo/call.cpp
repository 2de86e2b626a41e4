// Starting gloo's collectives that move bytes, and what all calls share.
#include "comm/gloo/call.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>

namespace tessera::comm::gloo {

namespace {

/// Whether the tensor's memory is the host's and holds its elements in order, with nothing between
/// and nothing left to apply.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor empty_plain(const at::Tensor& like) {
  return like.is_cpu() ? at::empty(like.sizes(), like.options()) : DeviceCall::empty_host(like);
}

std::vector<uint64_t> sizes_of(const Tensors& tensors) {
  std::vector<uint64_t> sizes;
  for (const auto& tensor : tensors) sizes.push_back(tensor.defined() ? tensor.nbytes() : 0);
  return sizes;
}

/// Longer ones would overflow the clock.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

}  // namespace

GlooBackend::Call::Call(GlooBackend& backend, const char* name, c10d::OpType type,
                        std::chrono::milliseconds timeout, bool in_background)
    : backend_(backend),
      check_("gloo", name, backend.getRank(), backend.getSize(),
             at::hasCUDA() ? Devices::CpuAndCuda : Devices::Cpu),
      type_(type),
      timeout_(timeout),
      in_background_(in_background) {
  backend.log_->check_usable(name);
}

void GlooBackend::Call::describe(Kind kind, const Tensors& contributions, int reduce,
                                 int64_t root) {
  descriptor_ = {.kind = kind, .reduce = reduce, .root = static_cast<int32_t>(root)};
  add_notes(descriptor_);
  for (const auto& tensor : contributions) {
    descriptor_.dtype = static_cast<int32_t>(tensor.scalar_type());
    descriptor_.bytes += tensor.nbytes();
  }
  descriptor_.largest_part = descriptor_.bytes;
}

void GlooBackend::Call::describe_parts(const Tensors& parts) {
  set_parts(descriptor_, sizes_of(parts));
  for (const auto& part : parts)
    descriptor_.layout = descriptor_.layout * 31 + static_cast<uint64_t>(part.scalar_type());
}

void GlooBackend::Call::describe_exchange(const std::vector<uint64_t>& sent,
                                          const std::vector<uint64_t>& received) {
  set_parts(descriptor_, backend_.getRank(), sent, received);
  descriptor_.largest_part = std::max(*std::max_element(sent.begin(), sent.end()),
                                      *std::max_element(received.begin(), received.end()));
}

at::Tensor GlooBackend::Call::memory_as(const at::Tensor& tensor, c10::ScalarType dtype) const {
  const auto count = static_cast<int64_t>(tensor.nbytes() / c10::elementSize(dtype));
  return at::from_blob(
      tensor.data_ptr(), {count}, [tensor, held = held_](void*) {}, at::TensorOptions(dtype));
}

bool GlooBackend::Call::is_carried() const {
  return backend_.queue_ && descriptor_.largest_part <= backend_.queue_->most_carried();
}

void GlooBackend::Call::move(Tensors sent, Tensors received) {
  if (is_carried())
    movements_.push_back({.sent = std::move(sent), .received = std::move(received)});
}

std::string GlooBackend::Call::title(uint64_t sequence) {
  descriptor_.sequence = sequence;
  return comm::describe(descriptor_);
}

void GlooBackend::Call::note_device(const at::Tensor& tensor) {
  if (!device_) {
    device_ = tensor.device();
    if (!tensor.is_cpu()) device_call_ = std::make_shared<DeviceCall>(copy_stream(tensor.device()));
  }
  TORCH_CHECK_VALUE(*device_ == tensor.device(), "gloo: ", check_.name(),
                    ": expected tensors on one device, got some on ", *device_, " and some on ",
                    tensor.device(), "; move them with .to()");
}

at::Tensor GlooBackend::Call::fetch(const at::Tensor& tensor) {
  auto copy = device_call_->to_host(tensor);
  device_call_->await_host();
  return copy;
}

at::Tensor GlooBackend::Call::read(const at::Tensor& tensor) {
  note_device(tensor);
  if (device_call_) return fetch(tensor);
  return is_plain(tensor) ? tensor : empty_plain(tensor).copy_(tensor);
}

at::Tensor GlooBackend::Call::write(const at::Tensor& tensor) {
  note_device(tensor);
  outputs.push_back(tensor);
  if (is_plain(tensor)) return tensor;
  return copies_.emplace_back(tensor, empty_plain(tensor)).second;
}

at::Tensor GlooBackend::Call::update(const at::Tensor& tensor) {
  const auto memory = write(tensor);
  if (memory.is_same(tensor)) return memory;
  return device_call_ ? copies_.back().second = fetch(tensor) : memory.copy_(tensor);
}

void GlooBackend::Call::add_broadcast(const at::Tensor& tensor, int64_t root) {
  const auto memory = bytes_of(update(tensor));
  Tensors sent(backend_.getSize());
  Tensors received(backend_.getSize());
  const bool is_root = backend_.getRank() == root;
  is_root ? std::fill(sent.begin(), sent.end(), memory) : void(received[root] = memory);
  move(std::move(sent), std::move(received));
  start([tensors = Tensors{memory}, root, timeout = timeout_](auto& gloo) mutable {
    return gloo.broadcast(tensors, {.rootRank = root, .timeout = timeout});
  });
}

void GlooBackend::Call::add_allgather_bytes(const at::Tensor& output, const at::Tensor& input) {
  auto to = bytes_of(output);
  auto from = bytes_of(input);
  if (is_carried())
    move(Tensors(backend_.getSize(), from), to.split_with_sizes(equal_parts(from.numel())));
  start([to, from, timeout = timeout_](auto& gloo) mutable {
    return gloo._allgather_base(to, from, {.timeout = timeout});
  });
}

void GlooBackend::Call::add_all_gather(const at::Tensor& output, const at::Tensor& input) {
  add_allgather_bytes(write(output), read(input));
}

void GlooBackend::Call::add_all_gather(const Tensors& parts, const at::Tensor& input) {
  const bool is_even = std::all_of(parts.begin(), parts.end(),
                                   [&](const auto& part) { return part.numel() == input.numel(); });
  if (!is_even) return add_exchange(parts, Tensors(parts.size(), input));
  TensorLists to(1);
  for (const auto& part : parts) to[0].push_back(bytes_of(write(part)));
  Tensors from{bytes_of(read(input))};
  move(Tensors(backend_.getSize(), from[0]), to[0]);
  start([to, from, timeout = timeout_](auto& gloo) mutable {
    return gloo.allgather(to, from, {.timeout = timeout});
  });
}

void GlooBackend::Call::add_alltoall_bytes(const at::Tensor& output,
                                           std::vector<int64_t> output_counts,
                                           const at::Tensor& input,
                                           std::vector<int64_t> input_counts) {
  auto to = bytes_of(output);
  auto from = bytes_of(input);
  const auto parts_of = [&](const at::Tensor& whole, const std::vector<int64_t>& counts) {
    return whole.split_with_sizes(counts.empty() ? equal_parts(whole.numel() / backend_.getSize())
                                                 : counts);
  };
  if (is_carried()) move(parts_of(from, input_counts), parts_of(to, output_counts));
  start([=, timeout = timeout_](auto& gloo) mutable {
    return gloo.alltoall_base(to, from, output_counts, input_counts, {.timeout = timeout});
  });
}

void GlooBackend::Call::add_exchange(const Tensors& parts, const Tensors& inputs) {
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  };
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  Tensors packed;
  for (const auto& input : inputs) {
    sent.push_back(bytes(input));
    if (input.defined()) packed.push_back(bytes_of(read(input)));
  }
  for (const auto& part : parts) received.push_back(bytes(part));
  const auto total = std::accumulate(received.begin(), received.end(), int64_t{0});
  const bool is_staged =
      std::ranges::any_of(parts, [](const auto& part) { return part.defined() && !part.is_cpu(); });
  const auto memory = at::empty({total}, at::TensorOptions(at::kByte).pinned_memory(is_staged));
  add_alltoall_bytes(memory, received, packed.empty() ? at::empty({0}, at::kByte) : at::cat(packed),
                     sent);
  int64_t begin = 0;
  for (const auto& part : parts) {
    if (!part.defined()) continue;
    note_device(part);
    outputs.push_back(part);
    // Parts of one dtype lie at multiples of its size.
    copies_.emplace_back(
        part, memory.narrow(0, begin, bytes(part)).view(part.scalar_type()).view(part.sizes()));
    begin += bytes(part);
  }
}

void GlooBackend::Call::add_exchange(const at::Tensor& output,
                                     const std::vector<int64_t>& output_rows,
                                     const at::Tensor& input,
                                     const std::vector<int64_t>& input_rows) {
  const auto to_bytes = [](const at::Tensor& tensor, std::vector<int64_t> rows) {
    const int64_t count = tensor.dim() == 0 ? 1 : tensor.size(0);
    for (auto& row : rows) row *= count == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / count;
    return rows;
  };
  add_alltoall_bytes(write(output), to_bytes(output, output_rows), read(input),
                     to_bytes(input, input_rows));
}

void GlooBackend::Call::add_barrier(const c10d::BarrierOptions& opts) {
  start([opts](auto& gloo) { return gloo.barrier(opts); });
}

std::function<void()> GlooBackend::Call::take_afterwards() {
  if (afterwards_.empty() && copies_.empty()) return {};
  return [functions = std::move(afterwards_), copies = std::move(copies_), call = device_call_,
          held = held_] {
    for (const auto& function : functions) function();
    for (const auto& [to, from] : copies) call ? call->copy_back(to, from) : void(to.copy_(from));
  };
}

WorkPtr GlooBackend::Call::submit() {
  const auto sequence = ++backend_.sequence_;
  auto work = c10::make_intrusive<CollectiveWork>(
      type_, backend_.log_->add(title(sequence), sequence), backend_.log_, std::move(outputs),
      device_call_, backend_.queue_);
  CollectiveWork::begin(work, take_afterwards());
  if (backend_.queue_) {
    const auto timeout =
        timeout_ <= kNoTimeout ? backend_.engine_->getOptions()->timeout : timeout_;
    backend_.queue_->submit({.work = work,
                             .descriptor = descriptor_,
                             .movements = std::move(movements_),
                             .starts = std::move(starts_),
                             .sends = {},
                             .held = held_,
                             .deadline = Clock::now() + std::min(timeout, kLongestTimeout)},
                            in_background_ || backend_.coalescing_);
  } else {
    try {
      std::vector<WorkPtr> parts;
      for (auto& start : starts_) parts.push_back(backend_.engine_->start(std::move(start)));
      CollectiveWork::follow(work, parts);
    } catch (...) {
      work->end(std::current_exception());  // for whoever waits, as if gloo had found out later
    }
  }
  if (backend_.coalescing_) backend_.coalescing_->push_back(work);
  return work;
}

}  // namespace tessera::comm::gloo
