#include "comm/shm/call.h"

#include "comm/backends.h"
#include "comm/completed_work.h"
#include "comm/shm/device_medium.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <iterator>

namespace tessera::comm::shm {
namespace {

// Up to here tensors of a device go through pinned memory and the host's slots: on a device that
// ranks share a round costs more than the copies.
constexpr size_t kMostStaged = size_t{64} << 10;

}  // namespace

ShmBackend::Call::Call(ShmBackend& backend, const char* name, c10d::OpType type,
                       std::chrono::milliseconds timeout, bool in_background)
    : backend_(backend),
      name_(name),
      timeout_(backend.timeout_of(timeout)),
      in_background_(in_background && !ForegroundScope::is_open()) {
  backend.channel().check_usable(std::strchr(name, ':') + 1);
  parts_.type = type;
  parts_.title = name;
}

Descriptor ShmBackend::Call::describe(Kind kind, const at::Tensor& tensor, int reduce,
                                      int64_t root) const {
  Descriptor descriptor{.kind = kind,
                        .dtype = tensor.defined() ? static_cast<int32_t>(tensor.scalar_type()) : -1,
                        .reduce = reduce,
                        .root = static_cast<int32_t>(root)};
  // A rank with a tensor elsewhere would look for the others' in other memory.
  std::optional<CallNote> note;
  if (tensor.defined() && !tensor.is_cpu())
    note.emplace("on " + tensor.device().str().substr(0, 4));
  add_notes(descriptor);
  return descriptor;
}

Place ShmBackend::Call::place(const at::Tensor& like, size_t bytes) {
  Place place{.channel = backend_.channel(), .medium = backend_.host_medium_};
  on_device_ = false;
  if (like.is_cpu()) return place;
  const auto* collective = std::strchr(name_, ':') + 1;
  check_not_captured(collective, like.device());
  follow_caller(backend_.device_stream(like.device()));
  if (bytes <= kMostStaged) return place;
  auto* medium = backend_.device_medium(collective, like.device());
  on_device_ = medium != nullptr;
  if (!on_device_) return place;
  return {.channel = backend_.channel(), .medium = *medium};
}

void ShmBackend::Call::follow_caller(const c10::Stream& stream) {
  // One for all that is coalesced: the stream does it in the order of issue.
  if (!parts_.device && backend_.coalescing_) parts_.device = backend_.coalescing_->parts_.device;
  if (parts_.device)
    parts_.device->follow_caller();
  else
    parts_.device = std::make_shared<DeviceCall>(stream);
}

std::optional<c10::Stream> ShmBackend::Call::use(const at::Tensor& tensor) const {
  if (!on_device_) return std::nullopt;
  parts_.device->keep(tensor);
  return parts_.device->stream();
}

Bytes ShmBackend::Call::keep(const at::Tensor& memory) {
  parts_.kept.push_back(memory);
  return bytes_of(memory);
}

void ShmBackend::Call::copy_back(const at::Tensor& to, const at::Tensor& from) {
  parts_.outputs.push_back(to);
  if (!to.is_same(from)) copies_.emplace_back(to, from);
}

Bytes ShmBackend::Call::read(const at::Tensor& tensor) {
  if (is_staged(tensor)) return keep(parts_.device->to_host(tensor));
  const c10::OptionalStreamGuard on_stream(use(tensor));
  return keep(make_plain(tensor));
}

Bytes ShmBackend::Call::write(const at::Tensor& tensor) {
  const c10::OptionalStreamGuard on_stream(use(tensor));
  const auto memory = is_staged(tensor)  ? DeviceCall::empty_host(tensor)
                      : is_plain(tensor) ? tensor
                                         : empty_plain(tensor);
  copy_back(tensor, memory);
  return keep(memory);
}

Bytes ShmBackend::Call::update(const at::Tensor& tensor) {
  const c10::OptionalStreamGuard on_stream(use(tensor));
  const auto memory = is_staged(tensor)  ? parts_.device->to_host(tensor)
                      : is_plain(tensor) ? tensor
                                         : make_plain(tensor);
  copy_back(tensor, memory);
  return keep(memory);
}

std::vector<Bytes> ShmBackend::Call::read_all(const std::vector<at::Tensor>& tensors) {
  std::vector<Bytes> memory;
  for (const auto& tensor : tensors) memory.push_back(read(tensor));
  return memory;
}

std::vector<Bytes> ShmBackend::Call::write_all(const std::vector<at::Tensor>& tensors) {
  std::vector<Bytes> memory;
  for (const auto& tensor : tensors) memory.push_back(write(tensor));
  return memory;
}

void ShmBackend::Call::add(CollectivePtr collective) {
  collective->timeout = timeout_;
  parts_.collectives.push_back(std::move(collective));
  ++backend_.issued_;
}

void ShmBackend::Call::absorb(Call& other) {
  const auto move_all = [](auto& to, auto& from) {
    to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
  };
  move_all(parts_.collectives, other.parts_.collectives);
  move_all(parts_.kept, other.parts_.kept);
  move_all(parts_.outputs, other.parts_.outputs);
  move_all(copies_, other.copies_);
  if (other.parts_.device) parts_.device = std::move(other.parts_.device);
}

WorkPtr ShmBackend::Call::join(WorkPtr message) {
  return messages_.emplace_back(std::move(message));
}

WorkPtr ShmBackend::Call::submit() {
  if (backend_.coalescing_ && backend_.coalescing_.get() != this) {
    backend_.coalescing_->absorb(*this);
    // The work of the whole is what the caller waits for; this one is a stand-in that is already
    // complete.
    return completed_work(parts_.type, {});
  }
  if (!copies_.empty()) {
    parts_.afterwards = [copies = std::move(copies_), device = parts_.device] {
      const at::NoGradGuard no_grad;
      for (const auto& [to, from] : copies)
        to.is_cpu() ? void(to.detach().copy_(from)) : device->copy_back(to, from);
    };
  }
  parts_.inputs = parts_.outputs;
  parts_.messages = std::move(messages_);
  auto work =
      c10::make_intrusive<ShmWork>(backend_.getRank(), std::move(parts_), backend_.executor_);
  if (work->collectives().empty()) {
    work->run(backend_.channel());  // messages alone have no place in the order of collectives
  } else {
    backend_.executor_->submit(work, !in_background_);
  }
  return work;
}

}  // namespace tessera::comm::shm
