#pragma once

#include "comm/store_protocol.h"

#include <chrono>
#include <deque>
#include <list>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace tessera::comm {

/// The keys and values of a UnixStore, on a thread of their own, for all processes of this user
/// that connect; others are turned away. What a client sends is bounded and checked: a broken one
/// loses its connection, nobody else notices.
class StoreServer {
 public:
  /// Takes over a socket that listens. Keys and values together take at most `most_bytes`.
  explicit StoreServer(LocalSocket listener, size_t most_bytes = size_t{1} << 30);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;

  struct Wait {
    std::vector<std::string> keys;
    size_t met = 0;  // so many of them have been seen
    Clock::time_point deadline;
  };
  struct Connection {
    LocalSocket socket;
    std::string input = {};
    std::string output = {};
    size_t sent = 0;
    std::optional<Wait> wait = std::nullopt;  // nothing more is read before it is answered
    bool is_broken = false;
  };

  void run();
  /// False: it is to stop.
  bool take_turn();
  int milliseconds_to_deadline() const;
  void accept_all();
  void serve(Connection& connection, short events);
  void read_some(Connection& connection);
  void write_some(Connection& connection);
  void take_requests(Connection& connection);
  void handle(Connection& connection, StoreMessage request);
  StoreMessage answer(StoreMessage& request);
  StoreMessage change(StoreMessage& request);
  StoreMessage add(const std::string& key, int64_t number);
  StoreMessage get(const std::vector<std::string>& keys) const;
  void put(const std::string& key, std::string value);
  void reply(Connection& connection, const StoreMessage& message);
  void answer_waits();
  bool is_met(Wait& wait) const;
  bool has(const std::string& key) const { return values_.contains(key) || queues_.contains(key); }

  LocalSocket listener_;
  const size_t most_bytes_;
  LocalSocket stop_;  // an eventfd
  Clock::time_point accept_again_{};
  std::list<Connection> connections_;
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;  // none is empty
  size_t bytes_ = 0;                                                 // of all keys and values
  std::thread thread_;                                               // last: uses all of the above
};

}  // namespace tessera::comm
