#include "comm/shm/join.h"

#include "base/text.h"
#include "comm/host.h"
#include "comm/store_keys.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <atomic>
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
  static Address parse(const std::string& text) {
    Address address;
    std::istringstream in(text);
    in >> address.host >> address.pid >> address.descriptor >> address.capacity >> address.offset >>
        address.layout_version >> address.block_bytes;
    TORCH_CHECK_WITH(DistBackendError, !in.fail(),
                     "shm: expected the address of a peer in the store, got '", text, "'");
    return address;
  }
};

Member map_member(const BackendRequest& request, int rank, const Address& theirs,
                  const Layout& layout) {
  TORCH_CHECK_WITH(DistBackendError, theirs.host == host_identity(), "shm: group '",
                   request.group_name, "': rank ", rank,
                   " is on another host, in another PID namespace or another user's than rank ",
                   request.rank, "; use the gloo backend, or \"auto\"");
  TORCH_CHECK_WITH(
      DistBackendError,
      theirs.layout_version == kLayoutVersion && theirs.block_bytes == layout.total_bytes,
      "shm: group '", request.group_name, "': rank ", rank,
      " runs another version of Tessera; start all ranks from one build");
  Member member;
  member.arena = PeerArena::open(theirs.pid, theirs.descriptor, theirs.capacity);
  member.process = PeerProcess::watch(theirs.pid);
  member.arena_base = member.arena->base();
  member.arena_capacity = theirs.capacity;
  auto* bytes = member.arena_base + theirs.offset;
  member.block = reinterpret_cast<RankBlock*>(bytes);
  member.outboxes = reinterpret_cast<Outbox*>(bytes + layout.outboxes_at);
  member.slots = bytes + layout.slots_at;
  return member;
}

// The store orders what ranks write into their blocks before what their peers read there. Where
// ranks are threads of one process, sanitizers can't see that inside libtorch; they see this.
std::atomic<uint64_t> meeting{0};

}  // namespace

std::vector<Member> join(const BackendRequest& request, Arena& arena, size_t block_offset,
                         const Layout& layout) {
  TORCH_CHECK_VALUE(request.size <= kMaxRanks, "shm: expected at most ", kMaxRanks,
                    " ranks in group '", request.group_name, "', got ", request.size,
                    "; use the gloo backend");
  const Address ours{.host = host_identity(),
                     .pid = getpid(),
                     .descriptor = arena.descriptor(),
                     .capacity = arena.capacity(),
                     .offset = block_offset,
                     .layout_version = kLayoutVersion,
                     .block_bytes = layout.total_bytes};
  meeting.fetch_add(1);
  const Meeting group{.store = *request.store,
                      .rank = request.rank,
                      .size = request.size,
                      .timeout = request.timeout,
                      .caller = "shm group '" + request.group_name + "'",
                      .processes = request.processes};
  const auto answers = exchange(group, "shm", ours.print());
  meeting.fetch_add(1);
  std::vector<Member> members;
  std::string verdict = kMapped;
  try {
    for (int rank = 0; rank < request.size; ++rank) {
      members.push_back(map_member(request, rank, Address::parse(answers[rank]), layout));
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

}  // namespace tessera::comm::shm
