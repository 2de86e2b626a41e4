#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace tessera::comm::shm {

/// Note [arena]. A process owns one memfd, as large as the machine's memory but sparse, and maps
/// the whole of it. Peers open it once through /proc/<pid>/fd/<fd> and map the whole of it too, so
/// whatever the owner allocates later is readable by them at the same offset without another
/// hand-over. The kernel frees it with the last process: a killed job leaves nothing behind, and
/// /dev/shm's size does not matter. Pages are reserved by fallocate before use, so missing memory
/// is an error here and never a SIGBUS later.
class Arena {
 public:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kLargestCapacity = size_t{256} << 30;

  /// This process's arena, made at the first call.
  static std::shared_ptr<Arena> own();

  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Offset of `bytes` (rounded up to pages) of zeroed or reused memory. `purpose` appears in the
  /// error.
  size_t allocate(size_t bytes, const std::string& purpose);
  /// In a process forked from the owner nothing happens: the memory is the owner's.
  void release(size_t offset);

  /// Where `pointer` lies in the arena, if its `bytes` do.
  std::optional<size_t> offset_of(const void* pointer, size_t bytes) const;

  uint8_t* base() const { return base_; }
  size_t capacity() const { return capacity_; }
  int descriptor() const { return descriptor_; }
  size_t allocated_bytes() const;

 private:
  Arena();
  size_t place(size_t bytes);
  void reserve_pages(size_t offset, size_t bytes, const std::string& purpose);

  const int owner_;  // process
  int descriptor_ = -1;
  uint8_t* base_ = nullptr;
  size_t capacity_ = 0;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> used_;  // offset -> bytes
  std::map<size_t, size_t> free_;  // offset -> bytes, no two adjacent
};

/// What messages advise where memory can't be shared.
inline constexpr const char* kCallGloo = "call init({.backend = \"gloo\"})";

/// A file without a name of `bytes`, which it keeps: nobody can shrink it under another's mapping.
/// Its memory goes with its last user. `reserve`: what is missing is an error here. -1 with errno.
int make_memory_file(size_t bytes, bool reserve);
/// Opens what make_memory_file made in process `pid` of this user under `descriptor`. Both come
/// from a peer: throws DistBackendError naming what is wrong with them.
int open_memory_file(int pid, int descriptor, size_t bytes);

/// Another process's arena, mapped here. Mapped once per owner however many groups share it; the
/// own process's arena is not mapped a second time, so that thread ranks (and the thread sanitizer)
/// see one address per byte.
class PeerArena {
 public:
  static std::shared_ptr<PeerArena> open(int pid, int descriptor, size_t capacity);
  ~PeerArena();
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;

  uint8_t* base() const { return base_; }
  size_t capacity() const { return capacity_; }

 private:
  PeerArena() = default;
  uint8_t* base_ = nullptr;
  size_t capacity_ = 0;
  std::shared_ptr<Arena>
      own_;  // set if the owner is this process: keeps the mapping alive instead of owning it
};

/// Sleeps until `word` is woken or no longer holds `seen`, at most `timeout`. May return early:
/// check again. Works between processes that map the same memory.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout);
void futex_wake_all(std::atomic<uint32_t>& word);

/// A bell in shared memory: rung by whoever changed something a sleeper may wait for. Ringing costs
/// one load while nobody sleeps. Order that makes it safe: the sleeper announces itself, looks
/// again, then sleeps; the ringer changes the state, then looks for sleepers; both steps are
/// sequentially consistent.
struct Bell {
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> rings;

  void ring() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      rings.fetch_add(1, std::memory_order_seq_cst);
      futex_wake_all(rings);
    }
  }
  /// Sleeps unless `ready()` already holds; returns after a ring, a time-out or for no reason.
  template <class Ready>
  void sleep(Ready&& ready, std::chrono::nanoseconds timeout) {
    struct Announced {  // `ready` may throw
      std::atomic<uint32_t>& sleepers;
      explicit Announced(std::atomic<uint32_t>& count) : sleepers(count) { sleepers.fetch_add(1); }
      ~Announced() { sleepers.fetch_sub(1); }
    } const announced(sleepers);
    const uint32_t seen = rings.load(std::memory_order_seq_cst);
    if (!ready()) futex_wait(rings, seen, timeout);
  }
};

/// An uninitialised CPU tensor in this process's arena.
at::Tensor make_shared_tensor(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace tessera::comm::shm
