#include "comm/call_check.h"

#include "base/environment.h"
#include "base/text.h"
#include "comm/type_names.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

namespace tessera::comm {
namespace {

static_assert(offsetof(Descriptor, function) == 64, "what peers compare is one cache line");

struct Notes {
  const char* function = nullptr;
  std::string note;
  bool in_program = false;
};

constexpr uint64_t kInProgram = 1;  // of Descriptor::note_hash
constexpr std::string_view kProgram = "program ";

Notes& notes() {
  thread_local Notes own;
  return own;
}

/// splitmix64's finalizer.
uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

uint64_t add_to_hash(uint64_t hash, std::string_view text) {
  for (const char letter : text)
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3ULL;
  return hash;
}

template <size_t N>
void put(std::array<char, N>& to, std::string_view text) {
  const size_t length = std::min(text.size(), N - 1);
  std::copy_n(text.data(), length, to.data());
  to[length] = '\0';
}

template <size_t N>
std::string_view text_in(const std::array<char, N>& text) {
  return {text.data(), strnlen(text.data(), N)};
}

void add_text(Descriptor& descriptor, const std::string& text) {
  const auto said = std::string(text_in(descriptor.note));
  put(descriptor.note, said.empty() ? text : said + ", " + text);
}

/// "8, 8 and 12".
std::string list_of(const std::vector<uint64_t>& parts) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == parts.size() ? " and " : ", ") + std::to_string(parts[i]);
  }
  return text;
}

bool are_alike(const std::vector<uint64_t>& parts) {
  return std::all_of(parts.begin(), parts.end(), [&](auto part) { return part == parts[0]; });
}

bool shows_bookkeeping() {
  static const bool shows = Environment().has("TESSERA_SHOW_BOOKKEEPING");
  return shows;
}

std::string arguments_of(const Descriptor& call) {
  std::string text;
  const auto add = [&](std::string_view argument) {
    text.append(text.empty() ? "" : ", ").append(argument);
  };
  if (call.dtype >= 0) {
    add(describe_elements(static_cast<c10::ScalarType>(call.dtype), call.bytes));
  } else if (call.bytes > 0) {
    add(format_bytes(call.bytes));
  }
  if (call.reduce >= 0) add(name_of_reduce(static_cast<c10d::ReduceOp::RedOpType>(call.reduce)));
  if (call.root >= 0) {
    const char* role = call.kind == Kind::Send      ? "to "
                       : call.kind == Kind::Receive ? "from "
                                                    : "root ";
    add(role + std::to_string(call.root));
  }
  if (call.note[0] != '\0') add(text_in(call.note));
  return text;
}

}  // namespace

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {
      "all_reduce",        "broadcast",         "reduce", "all_gather",
      "reduce_scatter",    "all_to_all",        "gather", "scatter",
      "barrier",           "monitored_barrier", "send",   "recv",
      "fully_shard's wait"};
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

std::string describe(const Descriptor& call) {
  const auto in_parentheses = [](const std::string& text) {
    return text.empty() ? text : " (" + text + ")";
  };
  const auto function = std::string(text_in(call.function));
  if (!function.empty() && !shows_bookkeeping())
    return function + in_parentheses(std::string(text_in(call.note)));
  std::string text = function.empty() ? "" : function + "'s ";
  text += name_of(call.kind);
  if (call.sequence != 0) text += " #" + std::to_string(call.sequence);
  return text + in_parentheses(arguments_of(call));
}

void set_parts(Descriptor& descriptor, const std::vector<uint64_t>& received) {
  descriptor.layout = received.size();
  for (const auto part : received) descriptor.layout = mix(descriptor.layout + part + 1);
  if (!are_alike(received)) add_text(descriptor, "parts of " + list_of(received) + " B");
}

void set_parts(Descriptor& descriptor, int rank, const std::vector<uint64_t>& sent,
               const std::vector<uint64_t>& received) {
  const auto of = [](uint64_t from, uint64_t to, uint64_t bytes) {
    return mix(mix((from << 32) + to + 1) + bytes);
  };
  descriptor.layout = 0;
  for (size_t peer = 0; peer < sent.size(); ++peer)
    descriptor.layout += of(rank, peer, sent[peer]) - of(peer, rank, received[peer]);
  if (are_alike(sent) && sent == received) return;
  add_text(descriptor, "sends " + list_of(sent) + " B, expects " + list_of(received) + " B");
}

bool agree(const Descriptor& one, const Descriptor& other) {
  // Parts of all_gather and all_to_all may be of any size; their layouts tell.
  const bool is_exchange = one.kind == Kind::AllToAll;
  const bool same_parts = (is_exchange || one.layout == other.layout) &&
                          (is_exchange || one.kind == Kind::AllGather || one.bytes == other.bytes);
  // What is not said on one side contradicts nothing: a call may come from another layer.
  const bool in_program = ((one.note_hash | other.note_hash) & kInProgram) != 0;
  const bool same_notes = one.note_hash == other.note_hash ||
                          (!in_program && (one.note_hash == 0 || other.note_hash == 0));
  return one.sequence == other.sequence && one.kind == other.kind && one.dtype == other.dtype &&
         one.reduce == other.reduce && one.root == other.root && same_parts && same_notes;
}

std::string describe_disagreement(const std::vector<RankCall>& calls) {
  constexpr size_t kShown = 8;  // ranks of one call
  std::vector<std::pair<std::string, std::vector<std::string>>> by_call;
  for (const auto& [rank, call] : calls) {
    const auto known = std::find_if(by_call.begin(), by_call.end(),
                                    [&](const auto& entry) { return entry.first == call; });
    if (known == by_call.end()) {
      by_call.push_back({call, {rank}});
    } else {
      known->second.push_back(rank);
    }
  }
  std::string text;
  for (const auto& [call, ranks] : by_call) {
    text.append(text.empty() ? kDisagree : ", ");
    const size_t shown = std::min(ranks.size(), kShown);
    for (size_t i = 0; i < shown; ++i) {
      text.append(i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ").append(ranks[i]);
    }
    if (shown < ranks.size()) text += " and " + std::to_string(ranks.size() - shown) + " more";
    text.append(ranks.size() == 1 ? " calls " : " call ").append(call);
  }
  text += "; every rank must issue the same collectives in the same order";
  const bool in_program = std::any_of(calls.begin(), calls.end(), [](const RankCall& call) {
    return call.call.find(kProgram) != std::string::npos;
  });
  if (!in_program) return text;
  return text +
         ". Calls with \"program\" are those of a compiled step, forward or backward; a rank "
         "without it runs eagerly, since its call differs from those it has a program for (sizes "
         "of "
         "the batch, scalars, modes): make compiled calls of one kind on all ranks at the same "
         "time, e.g. drop the last batch or pad it (DataParallelSemantics::OneDevice takes it with "
         "uneven_batches = true); tessera::explain() tells of each program";
}

std::optional<std::string> find_disagreement(const std::vector<Descriptor>& calls,
                                             const std::vector<std::string>& ranks) {
  bool all_agree = true;
  uint64_t layouts = 0;
  for (const auto& call : calls) {
    all_agree = all_agree && agree(calls[0], call);
    layouts += call.layout;
  }
  if (all_agree && (calls[0].kind != Kind::AllToAll || layouts == 0)) return std::nullopt;
  std::vector<RankCall> named;
  for (size_t rank = 0; rank < calls.size(); ++rank)
    named.push_back({ranks[rank], describe(calls[rank])});
  return describe_disagreement(named);
}

CallNote::CallNote(std::string_view text) : outer_length_(notes().note.size()) {
  auto& note = notes().note;
  note.append(note.empty() ? "" : ", ").append(text);
}

CallNote::~CallNote() { notes().note.resize(outer_length_); }

ProgramScope::ProgramScope(uint64_t program)
    : note_([&] {
        char number[17];
        std::snprintf(number, sizeof(number), "%08llx",
                      static_cast<unsigned long long>(program & 0xffffffffU));
        return std::string(kProgram) + number;
      }()),
      outer_(std::exchange(notes().in_program, true)) {}

ProgramScope::~ProgramScope() { notes().in_program = outer_; }

Bookkeeping::Bookkeeping(const char* function) : outer_(notes().function) {
  if (outer_ == nullptr) notes().function = function;
}

Bookkeeping::~Bookkeeping() { notes().function = outer_; }

void add_notes(Descriptor& descriptor) {
  const auto& said = notes();
  if (said.function == nullptr && said.note.empty()) return;
  uint64_t hash = add_to_hash(0xcbf29ce484222325ULL, said.note);
  if (said.function != nullptr) {
    put(descriptor.function, said.function);
    hash = add_to_hash(hash + 1, said.function);
  }
  put(descriptor.note, said.note);
  hash &= ~kInProgram;
  descriptor.note_hash = (hash == 0 ? 2 : hash) | (said.in_program ? kInProgram : 0);
}

}  // namespace tessera::comm
