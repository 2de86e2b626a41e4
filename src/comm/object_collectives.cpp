// Barriers, and bytes instead of tensors.
#include <tessera/comm.h>

#include "comm/backend_interfaces.h"
#include "comm/call_check.h"
#include "comm/groups.h"
#include "comm/store_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>

namespace tessera {
namespace {

/// Where the group's backend wants its tensors.
c10::Device device_of(const Group& group) {
  const auto types = group->getDeviceTypes();
  const bool on_cpu = std::find(types.begin(), types.end(), c10::DeviceType::CPU) != types.end();
  return on_cpu || types.empty() ? c10::Device(c10::kCPU) : c10::Device(types.front());
}

at::Tensor to_tensor(const std::string& bytes, size_t padded, c10::Device device) {
  auto tensor = at::zeros({static_cast<int64_t>(padded)}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor.to(device);
}

std::string to_string(const at::Tensor& tensor, size_t length) {
  const auto local = tensor.cpu().contiguous();
  return {static_cast<const char*>(local.const_data_ptr()), length};
}

/// Straight to the backend: the group's own function for this has another name in every version of
/// libtorch.
void gather_into(at::Tensor& all, at::Tensor& own, const Group& group) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  group->getBackend(own.device().type())->_allgather_base(all, own, options)->wait();
}

/// Every rank's count, on every rank.
std::vector<int64_t> gather_counts(int64_t count, const Group& group) {
  auto own = at::empty({1}, at::kLong).fill_(count).to(device_of(group));
  auto all = at::empty({group->getSize()}, own.options());
  gather_into(all, own, group);
  const auto local = all.cpu();
  return {local.const_data_ptr<int64_t>(), local.const_data_ptr<int64_t>() + group->getSize()};
}

}  // namespace

void barrier(const Group& group) {
  c10d::BarrierOptions options;
  options.asyncOp = false;
  // Not ProcessGroup::barrier: it keeps a tensor in a static variable, which ranks that are threads
  // would free twice.
  const auto used = comm::resolve(group, "barrier");
  const auto work = used->getBackend(device_of(used).type())->barrier(options);
  if (work) work->wait();
}

void monitored_barrier(const Group& group, std::optional<std::chrono::milliseconds> timeout) {
  const auto used = comm::resolve(group, "monitored_barrier");
  const auto context = comm::require_context("monitored_barrier");
  TORCH_CHECK_VALUE(!timeout || timeout->count() > 0,
                    "monitored_barrier: expected a timeout above 0, got ",
                    timeout ? timeout->count() : 0, " ms");
  const auto backend = used->getBackend(device_of(used).type());
  const auto limit = timeout ? *timeout : backend->getBackendOptions()->timeout;
  if (dynamic_cast<comm::HostBackend*>(backend.get()) != nullptr) {
    c10d::BarrierOptions options;
    options.timeout = limit;
    backend->monitoredBarrier(options, true);
    return;
  }
  // Through the store: it also works when the backend itself is stuck.
  int count = 0;
  {
    const std::lock_guard lock(context->mutex);
    count = context->barrier_counts[used->getGroupName()]++;
  }
  comm::exchange({.store = *used->getStore(),
                  .rank = used->getRank(),
                  .size = used->getSize(),
                  .timeout = limit,
                  .caller = "monitored_barrier in group '" + used->getGroupDesc() + "'",
                  .processes = comm::processes_of(context->world, ranks(used))},
                 "monitored barrier " + std::to_string(count), "here");
}

std::string broadcast_bytes(const std::string& bytes, int source, const Group& group) {
  const auto used = comm::resolve(group, "broadcast_bytes");
  const comm::Bookkeeping bookkeeping("broadcast_bytes");
  TORCH_CHECK_VALUE(source >= 0 && source < used->getSize(),
                    "broadcast_bytes: expected a source from 0 to ", used->getSize() - 1, ", got ",
                    source);
  c10d::BroadcastOptions options;
  options.rootRank = source;
  options.asyncOp = false;
  const auto device = device_of(used);
  std::vector<at::Tensor> length = {
      at::empty({1}, at::kLong).fill_(static_cast<int64_t>(bytes.size())).to(device)};
  used->broadcast(length, options)->wait();
  const auto count = static_cast<size_t>(length[0].item<int64_t>());
  std::vector<at::Tensor> content = {
      used->getRank() == source ? to_tensor(bytes, count, device)
                                : at::empty({static_cast<int64_t>(count)}, at::kByte).to(device)};
  used->broadcast(content, options)->wait();
  return to_string(content[0], count);
}

std::vector<std::string> gather_bytes(const std::string& bytes, const Group& group) {
  const auto used = comm::resolve(group, "gather_bytes");
  const comm::Bookkeeping bookkeeping("gather_bytes");
  const auto counts = gather_counts(static_cast<int64_t>(bytes.size()), used);
  const auto longest = *std::max_element(counts.begin(), counts.end());
  auto own = to_tensor(bytes, longest, device_of(used));
  auto all = at::empty({longest * used->getSize()}, own.options());
  gather_into(all, own, used);
  std::vector<std::string> result;
  for (int rank = 0; rank < used->getSize(); ++rank) {
    result.push_back(to_string(all.narrow(0, rank * longest, counts[rank]), counts[rank]));
  }
  return result;
}

}  // namespace tessera
