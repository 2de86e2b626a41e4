#include "comm/store_server.h"

#include "base/environment.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace tessera::comm {
namespace {

constexpr size_t kChunk = size_t{64} << 10;
constexpr std::chrono::milliseconds kPause{100};
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(24 * 365);

StoreMessage refuse(std::string reason) {
  return {.code = StoreCode::Refused, .words = {std::move(reason)}};
}

StoreMessage number(int64_t value) { return {.code = StoreCode::Done, .number = value}; }

/// Whether a request has the words that it needs.
bool is_complete(const StoreMessage& request) {
  const size_t words = request.words.size();
  switch (request.code) {
    case StoreCode::Set:
      return words % 2 == 0;
    case StoreCode::CompareSet:
      return words == 3;
    case StoreCode::Append:
    case StoreCode::Push:
      return words == 2;
    case StoreCode::Add:
    case StoreCode::Delete:
    case StoreCode::Pop:
    case StoreCode::Length:
      return words == 1;
    case StoreCode::Get:
    case StoreCode::Check:
    case StoreCode::Wait:
      return true;
    case StoreCode::Count:
    case StoreCode::List:
      return words == 0;
    default:
      return false;  // an answer is no request
  }
}

}  // namespace

StoreServer::StoreServer(LocalSocket listener, size_t most_bytes)
    : listener_(std::move(listener)),
      most_bytes_(most_bytes),
      stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  TORCH_CHECK_WITH(DistStoreError, stop_.is_open(),
                   "init: expected a descriptor for the store, got ", std::strerror(errno),
                   "; raise the limit on open files (ulimit -n)");
  // Programs that this one starts have no business with it.
  fcntl(listener_.get(), F_SETFD, FD_CLOEXEC);
  fcntl(listener_.get(), F_SETFL, O_NONBLOCK);
  thread_ = std::thread([this] { run(); });
}

StoreServer::~StoreServer() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

void StoreServer::run() {
  while (true) {
    try {
      if (!take_turn()) return;
    } catch (const std::bad_alloc&) {  // for somebody's sake; the others have to be served still
      std::this_thread::sleep_for(kPause);
    }
  }
}

bool StoreServer::take_turn() {
  const bool accepts = Clock::now() >= accept_again_;
  std::vector<pollfd> entries = {
      {.fd = stop_.get(), .events = POLLIN, .revents = 0},
      {.fd = accepts ? listener_.get() : -1, .events = POLLIN, .revents = 0}};
  for (const auto& connection : connections_) {
    short events = POLLIN;
    if (connection.wait) events = 0;  // a hang-up is told all the same
    if (!connection.output.empty()) events = POLLOUT;
    entries.push_back({.fd = connection.socket.get(), .events = events, .revents = 0});
  }
  poll(entries.data(), entries.size(), milliseconds_to_deadline());
  if (entries[0].revents != 0) return false;
  size_t index = 2;
  for (auto& connection : connections_) serve(connection, entries[index++].revents);
  answer_waits();
  connections_.remove_if([](const Connection& connection) { return connection.is_broken; });
  if (entries[1].revents != 0) accept_all();
  return true;
}

int StoreServer::milliseconds_to_deadline() const {
  auto next = Clock::time_point::max();
  if (accept_again_ > Clock::now()) next = accept_again_;
  for (const auto& connection : connections_) {
    if (connection.wait) next = std::min(next, connection.wait->deadline);
  }
  if (next == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

void StoreServer::accept_all() {
  constexpr int kAtOnce = 64;  // others are served in between, whoever knocks
  for (int i = 0; i < kAtOnce; ++i) {
    LocalSocket socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.is_open()) {
      // Out of descriptors: those who wait in the queue have to wait for one.
      const bool is_empty = errno == EAGAIN || errno == EINTR || errno == ECONNABORTED;
      if (!is_empty) accept_again_ = Clock::now() + kPause;
      return;
    }
    if (is_same_user(socket.get())) connections_.push_back({.socket = std::move(socket)});
  }
}

void StoreServer::serve(Connection& connection, short events) {
  if (events == 0) return;
  try {
    if ((events & POLLOUT) != 0) write_some(connection);
    if ((events & POLLIN) != 0) read_some(connection);
    if ((events & (POLLHUP | POLLERR)) != 0 && (events & POLLIN) == 0) connection.is_broken = true;
    take_requests(connection);
  } catch (const std::bad_alloc&) {
    connection.is_broken = true;
  }
}

void StoreServer::read_some(Connection& connection) {
  const size_t before = connection.input.size();
  connection.input.resize(before + kChunk);
  const auto count = recv(connection.socket.get(), connection.input.data() + before, kChunk, 0);
  connection.input.resize(before + std::max<ssize_t>(count, 0));
  const bool is_over = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
  if (is_over) connection.is_broken = true;
}

void StoreServer::write_some(Connection& connection) {
  const auto& output = connection.output;
  const auto count = send(connection.socket.get(), output.data() + connection.sent,
                          output.size() - connection.sent, MSG_NOSIGNAL);
  if (count < 0) {
    connection.is_broken = errno != EAGAIN && errno != EINTR;
    return;
  }
  connection.sent += static_cast<size_t>(count);
  if (connection.sent < output.size()) return;
  connection.output = {};
  connection.sent = 0;
}

void StoreServer::take_requests(Connection& connection) {
  // One at a time: the next is looked at when the answer to the last one has been taken.
  while (!connection.is_broken && !connection.wait && connection.output.empty()) {
    const std::string_view input = connection.input;
    if (input.size() < kFrameHeader) return;
    const auto bytes = message_bytes(input);
    if (bytes && input.size() < kFrameHeader + *bytes) return;
    auto request = bytes ? decode(input.substr(kFrameHeader, *bytes)) : std::nullopt;
    if (!request || !is_complete(*request)) {
      connection.is_broken = true;
      return;
    }
    connection.input.erase(0, kFrameHeader + *bytes);
    if (connection.input.empty()) connection.input.shrink_to_fit();
    handle(connection, std::move(*request));
  }
}

void StoreServer::handle(Connection& connection, StoreMessage request) {
  if (request.code != StoreCode::Wait) return reply(connection, answer(request));
  const auto timeout = std::clamp(std::chrono::milliseconds(request.number),
                                  std::chrono::milliseconds(0), kLongestWait);
  Wait wait{.keys = std::move(request.words), .deadline = Clock::now() + timeout};
  if (is_met(wait)) return reply(connection, {.code = StoreCode::Done});
  connection.wait = std::move(wait);
}

StoreMessage StoreServer::answer(StoreMessage& request) {
  const auto& words = request.words;
  switch (request.code) {
    case StoreCode::Get:
      return get(words);
    case StoreCode::Check:
      return number(std::ranges::all_of(words, [&](const auto& key) { return has(key); }) ? 1 : 0);
    case StoreCode::Count:
      return number(static_cast<int64_t>(values_.size() + queues_.size()));
    case StoreCode::Length: {
      const auto found = queues_.find(words[0]);
      return number(found == queues_.end() ? 0 : static_cast<int64_t>(found->second.size()));
    }
    case StoreCode::List: {
      StoreMessage keys;
      for (const auto& [key, value] : values_) keys.words.push_back(key);
      return keys;
    }
    default:
      return change(request);
  }
}

StoreMessage StoreServer::change(StoreMessage& request) {
  auto& words = request.words;
  size_t more = 0;
  for (const auto& word : words) more += word.size();
  if (more > most_bytes_ - std::min(bytes_, most_bytes_) && request.code != StoreCode::Delete &&
      request.code != StoreCode::Pop)
    return refuse("the store is full");
  switch (request.code) {
    case StoreCode::Set:
      for (size_t i = 0; i < words.size(); i += 2) put(words[i], std::move(words[i + 1]));
      return {};
    case StoreCode::CompareSet: {
      const auto found = values_.find(words[0]);
      const bool fits = found == values_.end() ? words[1].empty() : found->second == words[1];
      if (!fits) return {.words = {found == values_.end() ? words[1] : found->second}};
      put(words[0], words[2]);
      return {.words = {words[2]}};
    }
    case StoreCode::Append: {
      const auto found = values_.find(words[0]);
      put(words[0], found == values_.end() ? words[1] : found->second + words[1]);
      return {};
    }
    case StoreCode::Add:
      return add(words[0], request.number);
    case StoreCode::Delete: {
      const auto found = values_.find(words[0]);
      if (found == values_.end()) return number(0);
      bytes_ -= found->first.size() + found->second.size();
      values_.erase(found);
      return number(1);
    }
    case StoreCode::Push:
      bytes_ += words[1].size();
      queues_[words[0]].push_back(std::move(words[1]));
      return {};
    default: {  // Pop
      if (values_.contains(words[0])) return refuse("key '" + words[0] + "' is no queue");
      const auto found = queues_.find(words[0]);
      if (found == queues_.end()) return {.code = StoreCode::Absent};
      StoreMessage value{.words = {std::move(found->second.front())}};
      bytes_ -= value.words[0].size();
      found->second.pop_front();
      if (found->second.empty()) queues_.erase(found);
      return value;
    }
  }
}

StoreMessage StoreServer::add(const std::string& key, int64_t number_to_add) {
  const auto found = values_.find(key);
  const auto old = found == values_.end() ? std::optional<int64_t>(0) : parse_int(found->second);
  int64_t sum = 0;
  if (!old || __builtin_add_overflow(*old, number_to_add, &sum))
    return refuse("the value of key '" + key + "' is no number that can be added to");
  put(key, std::to_string(sum));
  return number(sum);
}

StoreMessage StoreServer::get(const std::vector<std::string>& keys) const {
  StoreMessage values;
  for (const auto& key : keys) {
    const auto found = values_.find(key);
    if (found == values_.end()) return {.code = StoreCode::Absent};
    values.words.push_back(found->second);
  }
  return values;
}

void StoreServer::put(const std::string& key, std::string value) {
  const auto [place, is_new] = values_.try_emplace(key);
  bytes_ += value.size() + (is_new ? key.size() : 0);
  bytes_ -= place->second.size();
  place->second = std::move(value);
}

void StoreServer::reply(Connection& connection, const StoreMessage& message) {
  auto frame = encode(message);
  if (!frame) frame = encode(refuse("the answer is too long"));
  connection.output = std::move(*frame);
  write_some(connection);
}

void StoreServer::answer_waits() {
  const auto now = Clock::now();
  for (auto& connection : connections_) {
    if (!connection.wait || connection.is_broken) continue;
    const bool is_met_now = is_met(*connection.wait);
    if (!is_met_now && now < connection.wait->deadline) continue;
    connection.wait.reset();
    reply(connection, {.code = is_met_now ? StoreCode::Done : StoreCode::TimedOut});
  }
}

bool StoreServer::is_met(Wait& wait) const {
  while (wait.met < wait.keys.size() && has(wait.keys[wait.met])) ++wait.met;
  return wait.met == wait.keys.size();
}

}  // namespace tessera::comm
