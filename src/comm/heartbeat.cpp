#include "comm/heartbeat.h"

#include "base/text.h"
#include "comm/peer_process.h"
#include "comm/rendezvous.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBeat{1000};
// Who has not asked for this long does not wait any more.
constexpr std::chrono::milliseconds kInterest{5000};
constexpr const char* kLeft = "left";

/// Equal for ranks that one lost link cuts off together.
std::string place_of(const World& world, int rank) {
  return world.hosts[rank] + " " + world.networks[rank];
}

std::string key_of(int leader) { return c10::str("heartbeat/", leader); }

std::string format_time(Clock::duration time) {
  return format_seconds(
      static_cast<double>(std::chrono::duration_cast<std::chrono::seconds>(time).count()));
}

}  // namespace

struct Heartbeat::State {
  struct Host {
    std::string label;  // "host 'b' (ranks 2 and 3)"
    std::string value = {};
    Clock::time_point changed{};
    Clock::time_point looked{};  // the store has answered
    bool has_left = false;
  };

  c10::intrusive_ptr<c10d::Store> store;
  std::chrono::milliseconds limit;
  std::string store_label;
  std::vector<int> leaders;  // by rank: the lowest one on its host
  int own_leader = 0;
  bool is_leader = false;
  std::shared_ptr<PeerProcess> leader;  // null: this rank, or one that can't be seen

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::map<int, Host> hosts;  // by leader; without the own one
  bool is_over = false;
  bool has_ended = false;
  std::optional<Clock::time_point> asked_store;  // under way since
  Clock::time_point wanted_until{};

  void run();
  template <class Ask>
  bool ask(const Ask& ask_store);
  void read_all();
};

/// False: the store has failed, which whoever uses it finds out by itself.
template <class Ask>
bool Heartbeat::State::ask(const Ask& ask_store) {
  {
    const std::lock_guard lock(mutex);
    asked_store = Clock::now();
  }
  bool is_answered = true;
  try {
    ask_store();
  } catch (const std::exception&) {
    is_answered = false;
  }
  const std::lock_guard lock(mutex);
  asked_store.reset();
  return is_answered;
}

void Heartbeat::State::run() {
  std::unique_lock lock(mutex);
  while (!is_over) {
    const bool is_wanted = Clock::now() < wanted_until;
    lock.unlock();
    if (is_leader || (leader && leader->stopped_for()))
      ask([&] { store->add(key_of(own_leader), 1); });
    if (is_wanted) read_all();
    lock.lock();
    changed.wait_for(lock, std::min(kBeat, limit / 4), [&] { return is_over; });
  }
  lock.unlock();
  if (is_leader) ask([&] { store->set(key_of(own_leader), kLeft); });
  lock.lock();
  has_ended = true;
  changed.notify_all();
}

void Heartbeat::State::read_all() {
  std::vector<int> others;
  {
    const std::lock_guard lock(mutex);
    for (const auto& [leader, host] : hosts) others.push_back(leader);
  }
  for (const int leader : others) {
    std::string value;
    const bool is_read = ask([&] {
      if (store->check({key_of(leader)})) value = store->get_to_str(key_of(leader));
    });
    const std::lock_guard lock(mutex);
    auto& host = hosts[leader];
    // Of what can't be read nothing is known.
    if (!is_read || value != host.value) host.changed = Clock::now();
    host.looked = Clock::now();
    host.value = value;
    host.has_left = value == kLeft;
  }
}

Heartbeat::Heartbeat(const World& world, std::chrono::milliseconds limit)
    : state_(std::make_shared<State>()) {
  state_->store = world.store->clone();
  state_->limit = limit;
  std::map<std::string, std::vector<int>> ranks_at;
  for (int rank = 0; rank < world.world_size; ++rank)
    ranks_at[place_of(world, rank)].push_back(rank);
  for (int rank = 0; rank < world.world_size; ++rank)
    state_->leaders.push_back(ranks_at[place_of(world, rank)].front());
  const auto label = [&](int leader) {
    const auto& ranks = ranks_at[place_of(world, leader)];
    return c10::str("host '", world.host_names[leader], "' (", format_ranks(ranks), ")");
  };
  state_->own_leader = state_->leaders[world.rank];
  state_->is_leader = state_->own_leader == world.rank;
  if (!state_->is_leader && !world.processes.empty())
    state_->leader = world.processes[state_->own_leader];
  for (const auto& [place, ranks] : ranks_at) {
    if (ranks.front() != state_->own_leader)
      state_->hosts[ranks.front()] = {.label = label(ranks.front())};
  }
  state_->store_label = label(0);
  std::thread([state = state_] { state->run(); }).detach();
}

Heartbeat::~Heartbeat() {
  std::unique_lock lock(state_->mutex);
  state_->is_over = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kBeat, [&] { return state_->has_ended; });
}

std::optional<std::string> Heartbeat::find_lost(const std::vector<int>& world_ranks) {
  const std::lock_guard lock(state_->mutex);
  const auto now = Clock::now();
  if (now >= state_->wanted_until) {
    for (auto& [leader, host] : state_->hosts) host.changed = host.looked = now;
  }
  state_->wanted_until = now + kInterest;
  const auto limit = state_->limit;
  if (state_->asked_store && now - *state_->asked_store > limit) {
    return c10::str("the store has given no answer for ", format_time(now - *state_->asked_store),
                    ": ", state_->store_label,
                    ", where rank 0 serves it unless a launcher does, is "
                    "lost, or the link to it is down");
  }
  for (const int rank : world_ranks) {
    const auto found = state_->hosts.find(state_->leaders[rank]);
    if (found == state_->hosts.end() || found->second.has_left) continue;
    // While the store gives no answer it alone is to blame.
    if (found->second.looked - found->second.changed > limit) {
      return c10::str(found->second.label, " has not been heard of for ",
                      format_time(now - found->second.changed),
                      ": the host is lost, or its link is down");
    }
  }
  return std::nullopt;
}

bool spans_hosts(const World& world) {
  std::set<std::string> places;
  for (int rank = 0; rank < static_cast<int>(world.networks.size()); ++rank)
    places.insert(place_of(world, rank));
  return places.size() > 1;
}

}  // namespace tessera::comm
