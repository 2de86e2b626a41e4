#include "state/save_job.h"

#include "base/devices.h"
#include "base/memory.h"
#include "dtensor/part.h"
#include "optim/options.h"
#include "state/files/disk.h"
#include "state/files/json_text.h"
#include "state/optimizer_kind.h"
#include "state/optimizer_state_dict.h"
#include "state/optimizer_text.h"

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <mutex>
#include <vector>

namespace tessera::state {

/// Bytes of host memory that have been used before, if there are some free: a first use would
/// fault every page in. Pinned: for copies from an accelerator.
at::Tensor take_host_memory(size_t bytes, bool is_pinned);
/// For the next one to take.
void give_back_host_memory(at::Tensor memory);

namespace {

/// Of all threads: ranks may be threads of one process.
struct HostMemory {
  std::mutex mutex;
  std::vector<at::Tensor> free;
};

HostMemory& host_memory() {
  static auto& memory = *new HostMemory();  // threads may outlive static objects
  return memory;
}

}  // namespace

at::Tensor take_host_memory(size_t bytes, bool is_pinned) {
  const auto needed = static_cast<int64_t>(bytes);
  {
    auto& memory = host_memory();
    const std::lock_guard lock(memory.mutex);
    const auto fits = [&](const at::Tensor& one) {
      return one.numel() >= needed && one.is_pinned() == is_pinned;
    };
    const auto found = std::find_if(memory.free.begin(), memory.free.end(), fits);
    if (found != memory.free.end()) {
      auto taken = std::move(*found);
      memory.free.erase(found);
      return taken;
    }
    memory.free.clear();  // too small: the model has grown
  }
  return at::empty({needed}, at::TensorOptions(at::kByte).pinned_memory(is_pinned));
}

void give_back_host_memory(at::Tensor memory) {
  auto& kept = host_memory();
  const std::lock_guard lock(kept.mutex);
  kept.free.push_back(std::move(memory));
}

namespace {

constexpr size_t kAlignment = 64;

size_t byte_count(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.numel()) * tensor.element_size();
}

/// Its bytes, row-major, in host memory; shares memory where it can.
at::Tensor on_host(const at::Tensor& tensor) {
  return dtensor::without_bits(tensor).cpu().contiguous();
}

std::string groups_text(const std::string& function, const torch::nn::Module& module,
                        const torch::optim::Optimizer& optimizer) {
  const auto names = named_groups(module, optimizer, function.c_str());
  OptimizerStateDict dict;
  dict.kind = kind_of(optimizer, function.c_str())->name();
  for (size_t g = 0; g < names.size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    dict.param_groups.push_back({.params = names[g],
                                 .options = group.has_options()
                                                ? optim::read_options(group.options())
                                                : optim::OptionValues()});
  }
  return optimizer_text(function, dict);
}

/// This rank's values for its file, in the order of the file.
std::vector<at::Tensor> values_for(const FilePlan& file, const Holdings& holdings,
                                   const Extra& extra) {
  std::map<std::string, const Holding*> by_name;
  for (const auto& holding : holdings.tensors) by_name.emplace(holding.name, &holding);
  std::vector<at::Tensor> values;
  for (const auto& item : file.items) {
    if (item.tensor.starts_with(kExtraPrefix)) {
      const auto& bytes = extra.at(item.tensor.substr(std::strlen(kExtraPrefix)));
      auto copy = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
      if (!bytes.empty()) std::memcpy(copy.data_ptr(), bytes.data(), bytes.size());
      values.push_back(std::move(copy));
      continue;
    }
    const auto& holding = *by_name.at(item.tensor);
    const auto piece = std::find_if(holding.pieces.begin(), holding.pieces.end(),
                                    [&](const HeldBox& one) { return one.box == item.box; });
    TORCH_INTERNAL_ASSERT(piece != holding.pieces.end());
    values.push_back(holding.local.dim() == 0
                         ? holding.local
                         : holding.local.narrow(0, piece->row, piece->box.length[0]));
  }
  return values;
}

}  // namespace

SaveJob::SaveJob(std::string function, const std::string& dir, const torch::nn::Module& module,
                 const torch::optim::Optimizer* optimizer, const Extra& extra,
                 const SaveOptions& options)
    : function_(std::move(function)), ranks_(options.group), keep_last_(options.keep_last) {
  const c10::AutoGradMode no_grad(false);
  const auto descriptions = ranks_.run(
      function_,
      [&] {
        TORCH_CHECK_VALUE(keep_last_ >= 0, function_, ": expected keep_last of at least 0, got ",
                          keep_last_);
        dir_ = clean_path(function_, dir);
        return take_stock(module, optimizer, extra);
      },
      dir);
  plan_ = plan_save(function_, descriptions);
  values_ = values_for(plan_.files[static_cast<size_t>(ranks_.rank())], holdings_, extra);
}

SaveJob::~SaveJob() {
  values_.clear();
  try {
    for (const auto& copy : copies_) copy.synchronize();
  } catch (const c10::Error&) {
    host_memory_.reset();  // the device may still write there: nobody gets it
  }
  if (host_memory_.defined()) give_back_host_memory(std::move(host_memory_));
}

std::string SaveJob::take_stock(const torch::nn::Module& module,
                                const torch::optim::Optimizer* optimizer, const Extra& extra) {
  holdings_ = hold_module(function_, module);
  std::string groups;
  if (optimizer != nullptr) {
    groups = groups_text(function_, module, *optimizer);
    auto state = hold_optimizer(function_, module, *optimizer);
    std::move(state.tensors.begin(), state.tensors.end(), std::back_inserter(holdings_.tensors));
  }
  if (ranks_.rank() == 0) check_place(function_, dir_);
  return describe_holdings(function_, holdings_, extra, groups);
}

// Note [snapshot]
// Training changes values as soon as save_async has returned. On a device they are copied twice: on
// the device, in the order of the current stream, and from there to the host on a stream of their
// own, beside what training queues next. Where the device lacks memory for that, they are copied to
// the host in the order of the current stream, and what training queues comes after it. The caller
// waits in neither case: the thread that writes does, and so does who gives host memory back.
void SaveJob::copy_to_host() {
  std::vector<c10::Stream> streams;  // one per device
  try {
    for (const auto& value : values_) {
      const auto is_there = [&](const auto& stream) { return stream.device() == value.device(); };
      if (!value.is_cpu() && std::ranges::none_of(streams, is_there))
        streams.push_back(current_stream(value.device()));
    }
    if (take_snapshots()) {
      for (auto& stream : streams) {
        c10::Event taken(stream.device_type());
        taken.record(stream);
        stream = pool_stream(stream.device());
        taken.block(stream);
      }
    }
    const c10::MultiStreamGuard guard(streams);
    copy_values();
  } catch (...) {
    copy_error_ = std::current_exception();
  }
  try {
    for (const auto& stream : streams) copies_.emplace_back(stream.device_type()).record(stream);
  } catch (...) {
    copy_error_ = std::current_exception();
    host_memory_.reset();  // nobody knows when the device has done with it
  }
}

bool SaveJob::take_snapshots() {
  auto snapshots = values_;
  try {
    for (auto& value : snapshots) {
      // A pending conjugation or minus would be applied before the bytes are there.
      if (!value.is_cpu())
        value = value.clone(at::MemoryFormat::Contiguous).resolve_conj().resolve_neg();
    }
  } catch (const c10::OutOfMemoryError&) {
    return false;
  }
  values_ = std::move(snapshots);
  return true;
}

void SaveJob::copy_values() {
  const auto rounded = [](size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  size_t total = 0;
  bool is_pinned = false;
  for (const auto& value : values_) {
    total += rounded(byte_count(value));
    is_pinned = is_pinned || value.is_cuda();
  }
  host_memory_ = take_host_memory(total, is_pinned);
  size_t position = 0;
  for (auto& value : values_) {
    const auto bytes = byte_count(value);
    auto room = host_memory_.narrow(0, static_cast<int64_t>(position), static_cast<int64_t>(bytes))
                    .view(value.scalar_type())
                    .view(value.sizes());
    if (value.is_cpu() && value.is_contiguous() && !value.is_conj() && !value.is_neg()) {
      copy_past_cache(room.data_ptr(), value.const_data_ptr(), bytes);
    } else if (value.is_cpu()) {
      room.copy_(value);
    } else {
      room.copy_(value.resolve_conj().resolve_neg(), /*non_blocking=*/true);
      value.record_stream(current_stream(value.device()));
    }
    value = std::move(room);
    position += rounded(bytes);
  }
  holdings_ = {};
}

std::string SaveJob::write_own_file() const {
  if (copy_error_) std::rethrow_exception(copy_error_);
  for (const auto& copy : copies_) copy.synchronize();
  const auto rank = static_cast<size_t>(ranks_.rank());
  const auto path =
      StagingFolder::path_for(dir_) / rank_file_name(rank, static_cast<size_t>(ranks_.size()));
  OutputFile file({function_, path.string()});
  const auto& header = plan_.files[rank].header;
  file.write(header.data(), header.size());
  auto checksums = Json::array();
  for (const auto& value : values_) {
    const auto bytes = on_host(value);
    std::vector<uint32_t> of_value;
    file.write(bytes.const_data_ptr(), byte_count(bytes), of_value);
    checksums.push_back(std::move(of_value));
  }
  file.finish();
  return checksums.dump();
}

void SaveJob::publish(const std::vector<std::string>& checksums) {
  std::map<std::pair<std::string, std::string>, std::vector<uint32_t>> by_part;
  for (size_t rank = 0; rank < checksums.size(); ++rank) {
    const auto of_rank = Json::parse(checksums[rank]).get<std::vector<std::vector<uint32_t>>>();
    for (size_t i = 0; i < of_rank.size(); ++i)
      by_part[{plan_.index.files[rank].name, plan_.files[rank].entries[i].name}] = of_rank[i];
  }
  for (auto& tensor : plan_.index.tensors) {
    for (auto& part : tensor.parts) part.checksums = by_part.at({part.file, part.name});
  }
  for (auto& extras : plan_.index.extras) {
    for (auto& [name, part] : extras) part.checksums = by_part.at({part.file, part.name});
  }
  const auto text = index_text(function_, plan_.index);
  OutputFile file({function_, (StagingFolder::path_for(dir_) / kIndexName).string()});
  file.write(text.data(), text.size());
  file.finish();
  folder_->publish();
  keep_last_checkpoints(dir_, keep_last_);
}

void SaveJob::write() {
  const c10::AutoGradMode no_grad(false);
  ranks_.run(function_, [&] {
    if (ranks_.rank() == 0) folder_ = std::make_unique<StagingFolder>(function_, dir_);
    return std::string();
  });
  const auto checksums = ranks_.run(function_, [&] { return write_own_file(); });
  bool is_published = false;
  try {
    ranks_.run(function_, [&] {
      if (ranks_.rank() == 0) publish(checksums);
      is_published = ranks_.rank() == 0;
      return std::string();
    });
  } catch (const c10::DistError& error) {  // of a peer that was to be told
    if (ranks_.rank() == 0 && !is_published) throw;
    TORCH_CHECK_WITH(DistBackendError, is_published, function_,
                     ": every rank has written its part, but rank ", ranks_.rank(),
                     " could not learn whether ", dir_.string(),
                     " is in its place: ", error.what_without_backtrace());
    TORCH_WARN(function_, ": ", dir_.string(), " is whole and in its place, but not every rank ",
               "could be told: ", error.what_without_backtrace());
  }
}

}  // namespace tessera::state
