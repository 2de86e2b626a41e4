#include "comm/shm/member.h"

#include "base/environment.h"
#include "comm/peer_process.h"
#include "comm/store_exchange.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <list>
#include <mutex>
#include <sstream>

namespace tessera::comm::shm {
namespace {

constexpr const char* kMapped = "mapped";

/// What a rank tells the others about its block.
struct Address {
  std::string host;
  int pid = 0;
  int descriptor = 0;
  size_t capacity = 0;
  size_t offset = 0;
  uint32_t layout_version = 0;
  size_t block_bytes = 0;

  std::string print() const {
    std::ostringstream out;
    out << host << ' ' << pid << ' ' << descriptor << ' ' << capacity << ' ' << offset << ' '
        << layout_version << ' ' << block_bytes;
    return out.str();
  }
};

constexpr size_t kLongestAddress = 512;
constexpr int64_t kMostDescriptors = 1 << 30;

/// The address of `rank` as the store has it: the words of anybody who could write there, so
/// nothing is used before it is checked, and what is wrong is told by rank and field.
class AddressReader {
 public:
  AddressReader(const BackendRequest& request, int rank, const std::string& text)
      : request_(request), rank_(rank) {
    check(text.size() <= kLongestAddress, "length", text.size(), "at most 512 characters");
    std::istringstream words(text);
    for (std::string word; std::getline(words, word, ' ');) words_.push_back(word);
    check(words_.size() == 7, "number of words", words_.size(), "7");
  }

  Address read(const Layout& layout) const {
    Address address{.host = words_[0]};
    check_host(address.host);
    address.layout_version =
        static_cast<uint32_t>(number(5, "layout version", std::numeric_limits<uint32_t>::max()));
    address.block_bytes = number(6, "size of block", std::numeric_limits<int64_t>::max());
    TORCH_CHECK_WITH(
        DistBackendError,
        address.layout_version == kLayoutVersion && address.block_bytes == layout.total_bytes,
        place(), " runs another version of Tessera; start all ranks from one build");
    address.pid = static_cast<int>(number(1, "pid", std::numeric_limits<int>::max()));
    check(address.pid > 0 && !is_of_another_user(address.pid), "pid", address.pid,
          "a process of this user");
    address.descriptor = static_cast<int>(number(2, "descriptor", kMostDescriptors));
    address.capacity = number(3, "capacity", Arena::kLargestCapacity);
    check(address.capacity % Arena::kPage == 0 && address.capacity >= layout.total_bytes,
          "capacity", address.capacity, "whole pages, enough for a block");
    address.offset = number(4, "offset", address.capacity - layout.total_bytes);
    check(address.offset % Arena::kPage == 0, "offset", address.offset, "the start of a page");
    return address;
  }

  template <class Value>
  void check(bool is_right, const char* field, const Value& value, const char* expected) const {
    TORCH_CHECK_WITH(DistBackendError, is_right, place(), ": ", field,
                     " of its memory in the store: expected ", expected, ", got ", value);
  }

 private:
  void check_host(const std::string& host) const {
    TORCH_CHECK_WITH(DistBackendError, host == host_identity(), place(),
                     " is on another host, in another PID namespace or another user's than rank ",
                     request_.rank, "; ", kCallGloo, ", or leave the backend out");
  }
  std::string place() const {
    return c10::str("shm: group '", request_.group_name, "': rank ", rank_);
  }
  size_t number(size_t word, const char* field, uint64_t most) const {
    const auto value = parse_int(words_[word]);
    check(value && *value >= 0 && static_cast<uint64_t>(*value) <= most, field, words_[word],
          "a number in its range");
    return static_cast<size_t>(*value);
  }

  const BackendRequest& request_;
  const int rank_;
  std::vector<std::string> words_;
};

Member map_member(const BackendRequest& request, int rank, const std::string& text,
                  const Layout& layout) {
  const AddressReader reader(request, rank, text);
  const Address theirs = reader.read(layout);
  Member member;
  try {
    member.arena = PeerArena::open(theirs.pid, theirs.descriptor, theirs.capacity);
  } catch (const c10::DistBackendError& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("shm: group '", request.group_name, "': rank ", rank,
                                               ": ", error.what_without_backtrace()));
  }
  member.process = PeerProcess::watch(theirs.pid);
  member.arena_base = member.arena->base();
  member.arena_capacity = theirs.capacity;
  auto* bytes = member.arena_base + theirs.offset;
  member.block = reinterpret_cast<RankBlock*>(bytes);
  reader.check(member.block->layout_version == kLayoutVersion && member.block->pid == theirs.pid,
               "offset", theirs.offset, "a block of that process");
  member.outboxes = reinterpret_cast<Outbox*>(bytes + layout.outboxes_at);
  member.slots = bytes + layout.slots_at;
  return member;
}

// The store orders what ranks write into their blocks before what their peers read there. Where
// ranks are threads of one process, sanitizers can't see that inside libtorch; they see this.
std::atomic<uint64_t> handshake{0};

}  // namespace

std::vector<Member> join(const BackendRequest& request, Arena& arena, size_t block_offset,
                         const Layout& layout) {
  TORCH_CHECK_VALUE(request.size <= kMaxRanks, "shm: expected at most ", kMaxRanks,
                    " ranks in group '", request.group_name, "', got ", request.size, "; ",
                    kCallGloo);
  const Address ours{.host = host_identity(),
                     .pid = getpid(),
                     .descriptor = arena.descriptor(),
                     .capacity = arena.capacity(),
                     .offset = block_offset,
                     .layout_version = kLayoutVersion,
                     .block_bytes = layout.total_bytes};
  handshake.fetch_add(1);
  const StoreGroup group{.store = *request.store,
                         .rank = request.rank,
                         .size = request.size,
                         .timeout = request.timeout,
                         .caller = "shm group '" + request.group_name + "'",
                         .processes = request.processes};
  const auto answers = exchange(group, "shm", ours.print());
  handshake.fetch_add(1);
  std::vector<Member> members;
  std::string verdict = kMapped;
  try {
    for (int rank = 0; rank < request.size; ++rank) {
      members.push_back(map_member(request, rank, answers[rank], layout));
    }
  } catch (const c10::Error& error) {
    verdict = error.what_without_backtrace();
  }
  // A second round: nobody may go on, and perhaps end, before everybody has mapped its memory.
  const auto verdicts = exchange(group, "mapped", verdict);
  for (int rank = 0; rank < request.size; ++rank) {
    TORCH_CHECK_WITH(DistBackendError, verdicts[rank] == kMapped, "rank ", rank,
                     " could not join: ", verdicts[rank]);
  }
  return members;
}

namespace {

struct RetiredBlock {
  std::shared_ptr<Arena> arena;
  size_t block_offset;
  const RankBlock* block;
  const Outbox* outboxes;
  std::vector<std::shared_ptr<PeerProcess>> peers;  // null for the own rank
  std::vector<std::shared_ptr<void>> kept;          // what else the peers could reach
};

bool is_unused(const RetiredBlock& retired) {
  const uint64_t departed = retired.block->departed.load(std::memory_order_acquire);
  for (size_t peer = 0; peer < retired.peers.size(); ++peer) {
    const bool gone =
        !retired.peers[peer] || (departed >> peer & 1) != 0 || retired.peers[peer]->has_exited();
    if (!gone) return false;
  }
  return true;
}

/// The block, and messages that nobody fetched before their sender left.
void release(const RetiredBlock& retired) {
  for (size_t peer = 0; peer < retired.peers.size(); ++peer) {
    for (const auto& entry : retired.outboxes[peer]) {
      const bool holds =
          entry.state.load(std::memory_order_acquire) != P2PEntry::Free && entry.is_buffered != 0;
      if (holds) retired.arena->release(entry.offset);
    }
  }
  retired.arena->release(retired.block_offset);
}

}  // namespace

void free_when_unused(std::shared_ptr<Arena> arena, size_t block_offset, int rank,
                      std::vector<Member> members, std::vector<std::shared_ptr<void>> kept) {
  static std::mutex mutex;
  // Outlives static destructors, which may still come here.
  static auto& retired_blocks = *new std::list<RetiredBlock>();
  RetiredBlock retired{.arena = std::move(arena),
                       .block_offset = block_offset,
                       .block = members[rank].block,
                       .outboxes = members[rank].outboxes,
                       .peers = {},
                       .kept = std::move(kept)};
  for (auto& member : members) retired.peers.push_back(std::move(member.process));
  retired.peers[rank] = nullptr;
  members.clear();
  const std::lock_guard lock(mutex);
  retired_blocks.push_back(std::move(retired));
  retired_blocks.remove_if([](const RetiredBlock& candidate) {
    if (!is_unused(candidate)) return false;
    release(candidate);
    return true;
  });
}

}  // namespace tessera::comm::shm
