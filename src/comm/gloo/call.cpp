// Starting gloo's collectives that move bytes, and what all calls share.
#include "comm/gloo/call.h"

#include "comm/dtype_names.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>

namespace tessera::comm::gloo {

at::Tensor memory_as(const at::Tensor& tensor, c10::ScalarType dtype) {
  const auto count = static_cast<int64_t>(tensor.nbytes() / c10::elementSize(dtype));
  return at::from_blob(tensor.data_ptr(), {count}, [tensor](void*) {}, at::TensorOptions(dtype));
}

namespace {

at::Tensor bytes_of(const at::Tensor& tensor) { return memory_as(tensor, at::kByte); }

/// Whether the tensor's memory holds its elements in order, with nothing between and nothing left
/// to apply.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor empty_plain(const at::Tensor& like) { return at::empty(like.sizes(), like.options()); }

}  // namespace

GlooBackend::Call::Call(GlooBackend& backend, const char* name, c10d::OpType type,
                        std::chrono::milliseconds timeout)
    : backend_(backend),
      check_("gloo", name, backend.getRank(), backend.getSize(), /*only_cpu=*/true),
      type_(type),
      timeout_(timeout) {
  backend.log_->check_usable(name);
}

void GlooBackend::Call::describe(const at::Tensor& tensor, const std::string& how) {
  arguments_ = c10::str(describe_elements(tensor.scalar_type(), tensor.nbytes()),
                        how.empty() ? "" : ", ", how);
}

std::string GlooBackend::Call::title(uint64_t sequence) const {
  return c10::str(check_.name(), " #", sequence, arguments_.empty() ? "" : " (" + arguments_ + ")");
}

at::Tensor GlooBackend::Call::read(const at::Tensor& tensor) const {
  return is_plain(tensor) ? tensor : empty_plain(tensor).copy_(tensor);
}

at::Tensor GlooBackend::Call::write(const at::Tensor& tensor) {
  outputs.push_back(tensor);
  if (is_plain(tensor)) return tensor;
  return copies_.emplace_back(tensor, empty_plain(tensor)).second;
}

at::Tensor GlooBackend::Call::update(const at::Tensor& tensor) {
  const auto memory = write(tensor);
  return memory.is_same(tensor) ? memory : memory.copy_(tensor);
}

void GlooBackend::Call::add_broadcast(const at::Tensor& tensor, int64_t root) {
  Tensors memory{bytes_of(update(tensor))};
  start(
      [&](auto& gloo) { return gloo.broadcast(memory, {.rootRank = root, .timeout = timeout_}); });
}

void GlooBackend::Call::add_allgather_bytes(const at::Tensor& output, const at::Tensor& input) {
  auto to = bytes_of(output);
  auto from = bytes_of(input);
  start([&](auto& gloo) { return gloo._allgather_base(to, from, {.timeout = timeout_}); });
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
  start([&](auto& gloo) { return gloo.allgather(to, from, {.timeout = timeout_}); });
}

void GlooBackend::Call::add_alltoall_bytes(const at::Tensor& output,
                                           std::vector<int64_t> output_counts,
                                           const at::Tensor& input,
                                           std::vector<int64_t> input_counts) {
  auto to = bytes_of(output);
  auto from = bytes_of(input);
  start([&](auto& gloo) {
    return gloo.alltoall_base(to, from, output_counts, input_counts, {.timeout = timeout_});
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
  const auto memory = at::empty({total}, at::kByte);
  add_alltoall_bytes(memory, received, packed.empty() ? at::empty({0}, at::kByte) : at::cat(packed),
                     sent);
  int64_t begin = 0;
  for (const auto& part : parts) {
    if (!part.defined()) continue;
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
  start([&](auto& gloo) { return gloo.barrier(opts); });
}

std::function<void()> GlooBackend::Call::take_afterwards() {
  if (afterwards_.empty() && copies_.empty()) return {};
  return [functions = std::move(afterwards_), copies = std::move(copies_)] {
    for (const auto& function : functions) function();
    for (const auto& [to, from] : copies) to.copy_(from);
  };
}

WorkPtr GlooBackend::Call::submit() {
  const auto sequence = ++backend_.sequence_;
  auto work = c10::make_intrusive<CollectiveWork>(
      type_, backend_.log_->add(title(sequence), sequence), backend_.log_, std::move(outputs));
  CollectiveWork::follow(work, parts_, take_afterwards());
  if (backend_.coalescing_) backend_.coalescing_->push_back(work);
  return work;
}

}  // namespace tessera::comm::gloo
