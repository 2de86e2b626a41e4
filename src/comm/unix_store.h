#pragma once

#include "comm/store_protocol.h"
#include "comm/store_server.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::comm {

/// A store for the ranks of one user on one host, behind a local socket: what TCPStore does, but
/// nobody else can connect, and nothing listens on the network. Every operation ends: a server that
/// gives no answer within the timeout is a DistStoreError.
class UnixStore final : public c10d::Store {
 public:
  using milliseconds = std::chrono::milliseconds;

  /// Connects to the server that listens under `name`, which may still be on its way up, within
  /// `timeout`; throws DistNetworkError. `server`, if it is in this process, lives as long as this.
  UnixStore(std::string name, milliseconds timeout, std::shared_ptr<StoreServer> server = nullptr);

  c10::intrusive_ptr<Store> clone() override;
  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  using Store::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  void queuePush(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;
  std::vector<std::string> listKeys() override;

 private:
  using Clock = std::chrono::steady_clock;

  /// The answer; throws DistStoreError if none comes in time or the server refuses.
  StoreMessage ask(const StoreMessage& request, milliseconds patience);
  StoreMessage ask(const StoreMessage& request);
  void connect(milliseconds patience);
  void send(const std::string& frame, Clock::time_point deadline);
  std::string receive(size_t bytes, Clock::time_point deadline);
  void await(short events, Clock::time_point deadline);
  [[noreturn]] void fail(const std::string& what);
  std::string place() const { return "the store at unix://@" + name_; }

  const std::string name_;
  const std::shared_ptr<StoreServer> server_;
  std::mutex mutex_;
  LocalSocket socket_;
  int process_;  // that connected: a forked child takes a connection of its own
};

}  // namespace tessera::comm
