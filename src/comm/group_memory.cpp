#include "comm/group_memory.h"

#include "base/text.h"
#include "comm/call_check.h"
#include "comm/shm/shm_backend.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <new>
#include <sstream>
#include <unordered_map>

namespace tessera::comm {
namespace shm {
namespace {

/// Of one rank; it alone raises the counts.
struct alignas(64) GateCounts {
  std::array<std::atomic<uint64_t>, GroupMemory::kGates> counts;
  Bell bell;
};

constexpr size_t kHeaderBytes = (sizeof(GateCounts) * kMaxRanks + 4095) / 4096 * 4096;

/// A file without a name. Its memory goes with the last mapping: nothing is left behind, and no
/// rank can free it under another's eyes.
class SharedFile {
 public:
  explicit SharedFile(int descriptor) : descriptor_(descriptor) {}
  ~SharedFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

class Mapping {
 public:
  Mapping(int descriptor, size_t bytes)
      : bytes_(bytes),
        base_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0)) {
    TORCH_CHECK_WITH(OutOfMemoryError, base_ != MAP_FAILED, "expected to map ", format_bytes(bytes),
                     " of shared memory, got ", std::strerror(errno));
    madvise(base_, bytes, MADV_DONTDUMP);
  }
  ~Mapping() { munmap(base_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint8_t* base() const { return static_cast<uint8_t*>(base_); }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  void* base_;
};

class MappedMemory final : public GroupMemory {
 public:
  MappedMemory(c10::intrusive_ptr<c10d::Backend> backend, std::unique_ptr<Mapping> mapping)
      : owner_(std::move(backend)),
        backend_(static_cast<ShmBackend&>(*owner_)),
        mapping_(std::move(mapping)) {}

  uint8_t* address() const override { return mapping_->base() + kHeaderBytes; }
  size_t bytes() const override { return mapping_->bytes() - kHeaderBytes; }

  void arrive(Gate gate) override {
    auto& own = gate_counts(backend_.getRank());
    auto& block = *backend_.channel().self().block;
    const auto gates = block.gates.load(std::memory_order_relaxed) + 1;
    auto& count = own.counts[index(gate)];
    if (gate == Gate::Written)
      block.gate_calls[gates % kDescriptorRing] = describe_call(count.load() + 1);
    count.fetch_add(1, std::memory_order_seq_cst);
    // Behind the count: whoever sees this one sees that one.
    if (gate == Gate::Written) block.gates.store(gates, std::memory_order_seq_cst);
    own.bell.ring();
  }

  void await(Gate gate) override {
    auto& channel = backend_.channel();
    const int rank = channel.rank();
    const uint64_t target = gate_counts(rank).counts[index(gate)].load(std::memory_order_relaxed);
    Pending pending;
    for (int peer = 0; peer < channel.size(); ++peer) {
      auto& theirs = gate_counts(peer);
      const auto& count = theirs.counts[index(gate)];
      if (peer == rank || count.load(std::memory_order_acquire) >= target) continue;
      if (pending.since == Clock::time_point{}) pending = pending_since_now(gate, target);
      channel.await(pending, peer, count, target, theirs.bell);
    }
  }

 private:
  static size_t index(Gate gate) { return static_cast<size_t>(gate); }
  GateCounts& gate_counts(int rank) const {
    return reinterpret_cast<GateCounts*>(mapping_->base())[rank];
  }
  Descriptor describe_call(uint64_t count) const {
    Descriptor descriptor{.sequence = count, .kind = Kind::Gate, .bytes = bytes()};
    add_notes(descriptor);
    return descriptor;
  }
  Pending pending_since_now(Gate gate, uint64_t count) const {
    Pending pending;
    pending.descriptor = describe_call(count);
    pending.issued = backend_.issued();
    pending.gates_beyond = backend_.channel().self().block->gates.load(std::memory_order_relaxed) +
                           (gate == Gate::Read ? 1 : 0);
    pending.since = Clock::now();
    pending.deadline = pending.since + std::min(backend_.timeout(), kLongestTimeout);
    return pending;
  }

  c10::intrusive_ptr<c10d::Backend> owner_;
  ShmBackend& backend_;
  std::unique_ptr<Mapping> mapping_;
};

int make_file(size_t bytes) {
  // Reserved now: what is missing is an error here and no SIGBUS later.
  const int descriptor = make_memory_file(bytes, /*reserve=*/true);
  const int error = descriptor < 0 ? errno : 0;
  const bool lacks_descriptors = error == EMFILE || error == ENFILE;
  TORCH_CHECK_WITH(DistBackendError, !lacks_descriptors, "expected memfd_create to work, got ",
                   std::strerror(error));
  TORCH_CHECK_WITH(OutOfMemoryError, error == 0, "expected ", format_bytes(bytes),
                   " of shared memory, got ", std::strerror(error),
                   error == EFBIG ? "; raise the limit on file sizes (ulimit -f)" : "");
  return descriptor;
}

std::unique_ptr<Mapping> map_of(int pid, int descriptor, size_t bytes) {
  const SharedFile file(open_memory_file(pid, descriptor, bytes));
  return std::make_unique<Mapping>(file.descriptor(), bytes);
}

constexpr char kMemory = 'm';
constexpr char kOther = 'o';

/// What went wrong, after its kind; empty: nothing.
template <class Function>
std::string problem_of(Function&& function) {
  try {
    function();
  } catch (const c10::OutOfMemoryError& error) {
    return kMemory + std::string(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return kOther + std::string(error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    return kMemory + std::string(error.what());
  } catch (const std::exception& error) {
    return kOther + std::string(error.what());
  }
  return {};
}

/// What went wrong on any rank is told on all: none waits for one that has given up.
template <class Function>
void agree_on(const Group& group, const std::string& purpose, Function&& function) {
  const comm::Bookkeeping bookkeeping("sharing memory");
  const auto all = gather_bytes(problem_of(std::forward<Function>(function)), group);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const auto problem = all[rank].substr(1);
    TORCH_CHECK_WITH(OutOfMemoryError, all[rank][0] != kMemory, purpose, ": ", problem, " on rank ",
                     rank, "; free memory on this host, or ", kCallGloo);
    TORCH_CHECK_WITH(DistBackendError, false, purpose, ": ", problem, " on rank ", rank,
                     "; where ranks can't share memory, ", kCallGloo);
  }
}

}  // namespace
}  // namespace shm

std::shared_ptr<GroupMemory> make_group_memory(const Group& group, size_t bytes,
                                               const std::string& purpose) {
  const auto served = group->getDeviceTypes();
  if (std::find(served.begin(), served.end(), c10::DeviceType::CPU) == served.end()) return nullptr;
  const auto backend = group->getBackend(c10::DeviceType::CPU);
  if (dynamic_cast<shm::ShmBackend*>(backend.get()) == nullptr) return nullptr;

  const size_t total = shm::kHeaderBytes + std::max<size_t>(bytes, 1);
  std::unique_ptr<shm::SharedFile> file;
  std::unique_ptr<shm::Mapping> mapping;
  shm::agree_on(group, purpose, [&] {
    if (rank(group) != 0) return;
    file = std::make_unique<shm::SharedFile>(shm::make_file(total));
    mapping = std::make_unique<shm::Mapping>(file->descriptor(), total);
  });
  const auto where =
      broadcast_bytes(file ? c10::str(getpid(), " ", file->descriptor()) : "", 0, group);
  shm::agree_on(group, purpose, [&] {
    if (mapping) return;
    std::istringstream words(where);
    int pid = 0;
    int descriptor = 0;
    words >> pid >> descriptor;
    mapping = shm::map_of(pid, descriptor, total);
  });
  return std::make_shared<shm::MappedMemory>(backend, std::move(mapping));
}

namespace {

struct Known {
  std::mutex mutex;
  std::unordered_map<const void*, SharedPart> parts;
};

Known& known() {
  static auto* all = new Known;  // parts may outlive static objects
  return *all;
}

}  // namespace

std::shared_ptr<void> declare_shared_part(const void* address, SharedPart part) {
  const std::lock_guard lock(known().mutex);
  known().parts[address] = std::move(part);
  return {const_cast<void*>(address), [](const void* declared) {
            const std::lock_guard unlisting(known().mutex);
            known().parts.erase(declared);
          }};
}

std::optional<SharedPart> find_shared_part(const void* address) {
  const std::lock_guard lock(known().mutex);
  const auto found = known().parts.find(address);
  return found == known().parts.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace tessera::comm
