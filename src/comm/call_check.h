#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Note [call check]. Every collective has a descriptor. Ranks compare those of one sequence number
/// before a byte of data is used, each with all the others', so that a mismatch is an error on all
/// ranks at the call, with one text that tells who called what. shm reads the peers' descriptors in
/// shared memory, gloo sends them ahead of the data. What the layers above know of a call (the
/// dimension of a functional all_gather, which public function it serves) is said by scopes of the
/// calling thread and becomes part of the descriptor when the collective is issued.
namespace tessera::comm {

enum class Kind : uint32_t {
  AllReduce,
  Broadcast,
  Reduce,
  AllGather,
  ReduceScatter,
  AllToAll,
  Gather,
  Scatter,
  Barrier,
  MonitoredBarrier,
  Send,
  Receive,
  Gate,
};
const char* name_of(Kind kind);
/// What each rank numbers for itself, apart from the collectives: messages between two ranks, gates
/// of memory they share.
inline bool is_outside_sequence(Kind kind) {
  return kind == Kind::Send || kind == Kind::Receive || kind == Kind::Gate;
}

/// What a rank is about to do. Lives in shared memory and in messages: plain bytes. Peers compare
/// its first 64 alone; the rest is for messages.
struct alignas(64) Descriptor {
  uint64_t sequence = 0;
  Kind kind = Kind::Barrier;
  int32_t dtype = -1;          // c10::ScalarType; -1 if the operation has none
  int32_t reduce = -1;         // c10d::ReduceOp; -1 likewise
  int32_t root = -1;           // group rank; -1 likewise
  uint64_t bytes = 0;          // of this rank's contribution
  uint64_t largest_part = 0;   // all-to-all: of the largest part sent; decides the number of rounds
  int64_t shared_offset = -1;  // where the contribution lies in this rank's arena; -1: it goes
                               // through the slots
  uint64_t layout = 0;         // sizes of parts; see set_parts()
  uint64_t note_hash = 0;      // of function and note as they were said; 0: nothing was; the lowest
                               // bit is set in a program, see ProgramScope
  std::array<char, 32> function{};  // that the call serves
  std::array<char, 96> note{};
};

/// "all_reduce #7 (1024 float32, 4 KiB, sum)"; bookkeeping shows as the function it serves, e.g.
/// "distribute_tensor", unless TESSERA_SHOW_BOOKKEEPING is set.
std::string describe(const Descriptor& descriptor);

/// all_gather: bytes by source, alike on all ranks.
void set_parts(Descriptor& descriptor, const std::vector<uint64_t>& received);
/// all_to_all: bytes by destination and by source; what one rank sends another is what that one
/// receives.
void set_parts(Descriptor& descriptor, int rank, const std::vector<uint64_t>& sent,
               const std::vector<uint64_t>& received);

/// Whether two ranks' calls go together, as far as two can tell. The layouts of all ranks'
/// all_to_all add up to 0.
bool agree(const Descriptor& one, const Descriptor& other);

/// A rank as messages name it, and its call.
struct RankCall {
  std::string rank;
  std::string call;
};
inline constexpr std::string_view kDisagree = "the ranks disagree: ";
/// "the ranks disagree: rank 0 calls …, rank 1 calls …; …" with ranks of one call taken together.
std::string describe_disagreement(const std::vector<RankCall>& calls);
/// The text of the above if the calls of all ranks, by rank, do not go together.
std::optional<std::string> find_disagreement(const std::vector<Descriptor>& calls,
                                             const std::vector<std::string>& ranks);

/// What the calling thread knows of the collectives it issues while this lives, e.g. "dim 1": ranks
/// must agree on it. An inner one is appended to an outer one.
class CallNote {
 public:
  explicit CallNote(std::string_view text);
  ~CallNote();
  CallNote(const CallNote&) = delete;
  CallNote& operator=(const CallNote&) = delete;

 private:
  size_t outer_length_;
};

/// Collectives that the calling thread issues while this lives are those of a compiled program.
/// Ranks must agree on it, also with those that say nothing: a rank that runs eagerly sends other
/// messages, which may pair by chance.
class ProgramScope {
 public:
  explicit ProgramScope(uint64_t program);
  ~ProgramScope();
  ProgramScope(const ProgramScope&) = delete;
  ProgramScope& operator=(const ProgramScope&) = delete;

 private:
  CallNote note_;
  bool outer_;
};

/// Collectives that the calling thread issues while this lives are bookkeeping of a public
/// function: errors name the function, and ranks must agree on it. The outermost counts. `function`
/// is a literal.
class Bookkeeping {
 public:
  explicit Bookkeeping(const char* function);
  ~Bookkeeping();
  Bookkeeping(const Bookkeeping&) = delete;
  Bookkeeping& operator=(const Bookkeeping&) = delete;

 private:
  const char* outer_;
};

/// Puts what the calling thread's scopes say into the descriptor.
void add_notes(Descriptor& descriptor);

}  // namespace tessera::comm
