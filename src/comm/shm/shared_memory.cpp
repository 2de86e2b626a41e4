#include "comm/shm/shared_memory.h"

#include "base/signal_block.h"
#include "base/text.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

namespace tessera::comm::shm {
namespace {

// Below this a request is not weighed against the machine's free memory: reading /proc would cost
// more.
constexpr size_t kWeighedBytes = size_t{64} << 20;

constexpr const char* kMemoryName = "tessera";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

size_t round_to_pages(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + Arena::kPage - 1) / Arena::kPage * Arena::kPage;
}

size_t pick_capacity() {
  const auto physical =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t capacity = std::min(physical, Arena::kLargestCapacity);
  rlimit limit{};
  // A file can't grow past RLIMIT_FSIZE, nor a mapping past RLIMIT_AS.
  for (const auto kind : {RLIMIT_FSIZE, RLIMIT_AS}) {
    if (getrlimit(kind, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
      capacity = std::min<size_t>(capacity, limit.rlim_cur / 8);
    }
  }
  return std::max<size_t>(capacity / Arena::kPage * Arena::kPage, size_t{64} << 20);
}

std::optional<size_t> number_in(const char* path) {
  std::ifstream file(path);
  size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // absent, or "max"
}

/// What the machine, and the control group it may be confined to, can still give.
size_t available_memory() {
  size_t available = std::numeric_limits<size_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string name, unit; meminfo >> name;) {
    size_t kilobytes = 0;
    if (!(meminfo >> kilobytes)) break;
    if (name == "MemAvailable:") available = kilobytes * 1024;
    std::getline(meminfo, unit);
  }
  const auto limit = number_in("/sys/fs/cgroup/memory.max");
  const auto current = number_in("/sys/fs/cgroup/memory.current");
  if (limit && current) available = std::min(available, *limit > *current ? *limit - *current : 0);
  return available;
}

uint8_t* map(int descriptor, size_t capacity) {
  void* address =
      mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (address == MAP_FAILED) return nullptr;
  madvise(address, capacity,
          MADV_DONTDUMP);  // a core file would hold every rank's memory once per rank
  return static_cast<uint8_t*>(address);
}

}  // namespace

int make_memory_file(size_t bytes, bool reserve) {
  const int descriptor = memfd_create(kMemoryName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return -1;
  const SignalBlock block(SIGXFSZ);
  const auto size = static_cast<off_t>(bytes);
  int error = 0;
  if (reserve) {
    error = posix_fallocate(descriptor, 0, size);
  } else if (ftruncate(descriptor, size) != 0) {
    error = errno;
  }
  if (error == 0 && fcntl(descriptor, F_ADD_SEALS, kSeals) != 0) error = errno;
  if (error == 0) return descriptor;
  close(descriptor);
  errno = error;
  return -1;
}

int open_memory_file(int pid, int descriptor, size_t bytes) {
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  // Looked at before it is opened: opening a pipe or a terminal has effects of its own.
  std::error_code unreadable;
  const auto target = std::filesystem::read_symlink(path, unreadable).string();
  TORCH_CHECK_WITH(DistBackendError, !unreadable, "shm: expected to open ", path,
                   " of a peer, got ", unreadable.message(),
                   "; the ranks need one user and one PID namespace; otherwise ", kCallGloo);
  TORCH_CHECK_WITH(DistBackendError, target.starts_with(std::string("/memfd:") + kMemoryName),
                   "shm: descriptor ", descriptor, " of process ", pid, " is '", target,
                   "', expected shared memory of a rank");
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  struct stat status{};
  const bool usable = opened >= 0 && fstat(opened, &status) == 0;
  const int error = errno;
  TORCH_CHECK_WITH(DistBackendError, usable, "shm: expected to open ", path, " of a peer, got ",
                   std::strerror(error),
                   "; the ranks need one user and one PID namespace; otherwise ", kCallGloo);
  const int seals = fcntl(opened, F_GET_SEALS);
  const bool fits = static_cast<size_t>(status.st_size) == bytes && status.st_uid == geteuid() &&
                    seals >= 0 && (seals & kSeals) == kSeals;
  if (!fits) close(opened);
  TORCH_CHECK_WITH(DistBackendError, fits, "shm: descriptor ", descriptor, " of process ", pid,
                   ": expected sealed memory of ", bytes, " bytes of user ", geteuid(), ", got ",
                   status.st_size, " bytes of user ", status.st_uid);
  return opened;
}

std::shared_ptr<Arena> Arena::own() {
  // Never destroyed before exit: tensors in it may outlive every group.
  static std::mutex mutex;
  static auto& arena = *new std::shared_ptr<Arena>();
  static pid_t owner = 0;
  const std::lock_guard lock(mutex);
  if (!arena || owner != getpid()) {  // after a fork the child starts its own
    arena = std::shared_ptr<Arena>(new Arena());
    owner = getpid();
  }
  return arena;
}

Arena::Arena() : owner_(getpid()), capacity_(pick_capacity()) {
  descriptor_ = make_memory_file(capacity_, /*reserve=*/false);
  if (descriptor_ < 0) {
    const int error = errno;
    TORCH_CHECK_WITH(DistBackendError, false, "shm: could not make a memory file of ",
                     format_bytes(capacity_), ": ", std::strerror(error), "; ",
                     error == EFBIG    ? "raise the limit on file sizes (ulimit -f), or "
                     : error == EMFILE ? "raise the limit on open files (ulimit -n), or "
                                       : "",
                     kCallGloo);
  }
  base_ = map(descriptor_, capacity_);
  if (base_ == nullptr) {
    const int error = errno;
    close(descriptor_);
    TORCH_CHECK_WITH(DistBackendError, false, "shm: expected to map ", format_bytes(capacity_),
                     " of address space, got ", std::strerror(error), "; raise the limit on ",
                     error == EFBIG ? "file sizes (ulimit -f)" : "virtual memory (ulimit -v)",
                     ", or ", kCallGloo);
  }
  free_[0] = capacity_;
}

Arena::~Arena() {
  munmap(base_, capacity_);
  close(descriptor_);
}

size_t Arena::place(size_t bytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < bytes) continue;
    const auto [offset, length] = *it;
    free_.erase(it);
    if (length > bytes) free_[offset + bytes] = length - bytes;
    used_[offset] = bytes;
    return offset;
  }
  return capacity_;
}

void Arena::reserve_pages(size_t offset, size_t bytes, const std::string& purpose) {
  const size_t available = bytes >= kWeighedBytes ? available_memory() : bytes;
  int error = bytes > available ? ENOMEM : 0;
  if (error == 0) {
    const auto start = static_cast<off_t>(offset);
    while (fallocate(descriptor_, 0, start, static_cast<off_t>(bytes)) != 0) {
      if (errno == EINTR) continue;
      error = errno;
      break;
    }
  }
  if (error == 0) return;
  release(offset);
  TORCH_CHECK_WITH(OutOfMemoryError, false, purpose, ": expected ", format_bytes(bytes),
                   " of shared memory, got ", std::strerror(error), " (",
                   format_bytes(std::min(available, available_memory())),
                   " available); free memory on this host, use smaller tensors or fewer ranks");
}

size_t Arena::allocate(size_t bytes, const std::string& purpose) {
  size_t offset = capacity_;
  if (bytes <= capacity_) {
    bytes = round_to_pages(bytes);
    const std::lock_guard lock(mutex_);
    offset = place(bytes);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, offset < capacity_, purpose, ": expected ",
                   format_bytes(bytes), " of shared memory, got an arena of ",
                   format_bytes(capacity_),
                   " with too little room; free shared tensors or use smaller ones");
  reserve_pages(offset, bytes, purpose);
  return offset;
}

void Arena::release(size_t offset) {
  if (owner_ != getpid()) return;
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(offset);
  TORCH_INTERNAL_ASSERT(used != used_.end(), "shm: release of an unknown offset ", offset);
  size_t bytes = used->second;
  used_.erase(used);
  fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
  const auto next = free_.upper_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.upper_bound(offset);
  if (after != free_.begin()) {
    const auto previous = std::prev(after);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

std::optional<size_t> Arena::offset_of(const void* pointer, size_t bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const auto base = reinterpret_cast<uintptr_t>(base_);
  if (address < base || address + bytes > base + capacity_) return std::nullopt;
  return address - base;
}

size_t Arena::allocated_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (const auto& [offset, bytes] : used_) total += bytes;
  return total;
}

std::shared_ptr<PeerArena> PeerArena::open(int pid, int descriptor, size_t capacity) {
  static std::mutex mutex;
  static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<PeerArena>> known;
  auto arena = std::shared_ptr<PeerArena>(new PeerArena());
  arena->capacity_ = capacity;
  if (pid == getpid()) {
    arena->own_ = Arena::own();
    arena->base_ = arena->own_->base();
    TORCH_CHECK_WITH(DistBackendError,
                     capacity == arena->own_->capacity() && descriptor == arena->own_->descriptor(),
                     "shm: capacity or descriptor are not those of this process's own arena");
    return arena;
  }
  const int opened = open_memory_file(pid, descriptor, capacity);
  struct stat status{};
  fstat(opened, &status);
  const std::lock_guard lock(mutex);
  auto& slot = known[{status.st_dev, status.st_ino}];
  if (auto existing = slot.lock()) {
    close(opened);
    return existing;
  }
  arena->base_ = map(opened, capacity);
  close(opened);  // the mapping keeps the memory
  TORCH_CHECK_WITH(DistBackendError, arena->base_ != nullptr,
                   "shm: could not map the arena of process ", pid,
                   "; raise the limit on virtual memory (ulimit -v), or ", kCallGloo);
  slot = arena;
  return arena;
}

PeerArena::~PeerArena() {
  if (!own_ && base_ != nullptr) munmap(base_, capacity_);
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout) {
  if (timeout.count() <= 0) return;
  timespec spec{};
  spec.tv_sec = timeout.count() / 1'000'000'000;
  spec.tv_nsec = timeout.count() % 1'000'000'000;
  // Not FUTEX_PRIVATE: the sleepers are other processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &spec, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

at::Tensor make_shared_tensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  TORCH_CHECK_VALUE(options.device().is_cpu(), "empty_shared: expected a CPU tensor, got device ",
                    options.device());
  TORCH_CHECK_VALUE(options.layout() == c10::kStrided,
                    "empty_shared: expected a dense tensor, got layout ", options.layout());
  size_t bytes = options.dtype().itemsize();
  for (const auto size : sizes) {
    TORCH_CHECK_VALUE(size >= 0, "empty_shared: expected sizes of 0 or more, got ", sizes);
    TORCH_CHECK_VALUE(!__builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes),
                      "empty_shared: a tensor of sizes ", sizes, " is larger than memory can be");
  }
  auto arena = Arena::own();
  const auto offset = arena->allocate(bytes, "empty_shared");
  auto tensor = at::for_blob(arena->base() + offset, sizes)
                    .deleter([arena, offset](void*) { arena->release(offset); })
                    .options(options.requires_grad(false))
                    .make_tensor();
  return options.requires_grad() ? tensor.set_requires_grad(true) : tensor;
}

}  // namespace tessera::comm::shm
