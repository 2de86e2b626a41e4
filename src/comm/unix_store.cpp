#include "comm/unix_store.h"

#include "base/text.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kForever = std::chrono::hours(24 * 365);
constexpr milliseconds kRetry{10};
// For a server that has to come up again after a connection was given up.
constexpr milliseconds kReconnect{1000};
// By how much the answer to a wait may be late.
constexpr milliseconds kGrace{10'000};

/// c10d's word for "wait for ever" is 0.
milliseconds bounded(milliseconds timeout) {
  return timeout.count() <= 0 ? kForever : std::min(timeout, kForever);
}

}  // namespace

UnixStore::UnixStore(std::string name, milliseconds timeout, std::shared_ptr<StoreServer> server)
    : Store(timeout), name_(std::move(name)), server_(std::move(server)), process_(getpid()) {
  connect(bounded(timeout));
}

c10::intrusive_ptr<c10d::Store> UnixStore::clone() {
  return c10::make_intrusive<UnixStore>(name_, timeout_, server_);
}

void UnixStore::connect(milliseconds patience) {
  const auto deadline = Clock::now() + patience;
  while (true) {
    socket_ = connect_locally(name_);
    const int error = errno;
    if (socket_.is_open()) break;
    const bool may_come = error == ECONNREFUSED || error == EAGAIN || error == EINTR;
    TORCH_CHECK_WITH(DistNetworkError, may_come && Clock::now() + kRetry < deadline, place(),
                     " can't be reached within ",
                     format_seconds(static_cast<double>(patience.count()) / 1e3), ": ",
                     std::strerror(error));
    std::this_thread::sleep_for(kRetry);
  }
  if (is_same_user(socket_.get())) return;
  socket_.reset();
  TORCH_CHECK_WITH(DistNetworkError, false, place(),
                   " belongs to another user; somebody has taken its name");
}

void UnixStore::fail(const std::string& what) {
  socket_.reset();  // what comes late must not be taken for the answer to something else
  C10_THROW_ERROR(DistStoreError, place() + " " + what);
}

void UnixStore::await(short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) fail("gave no answer in time; is the process that serves it (rank 0) stopped?");
    pollfd entry{.fd = socket_.get(), .events = events, .revents = 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 1 << 30)));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) fail(c10::str("can't be waited for: ", std::strerror(errno)));
  }
}

void UnixStore::send(const std::string& frame, Clock::time_point deadline) {
  size_t sent = 0;
  while (sent < frame.size()) {
    const auto count =
        ::send(socket_.get(), frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EINTR) {
      await(POLLOUT, deadline);
    } else {
      fail("is gone; has the process that serves it (rank 0) ended?");
    }
  }
}

std::string UnixStore::receive(size_t count, Clock::time_point deadline) {
  std::string bytes(count, '\0');
  for (size_t have = 0; have < count;) {
    await(POLLIN, deadline);
    const auto got = recv(socket_.get(), bytes.data() + have, count - have, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
      fail("is gone; has the process that serves it (rank 0) ended?");
    have += static_cast<size_t>(std::max<ssize_t>(got, 0));
  }
  return bytes;
}

StoreMessage UnixStore::ask(const StoreMessage& request) { return ask(request, bounded(timeout_)); }

StoreMessage UnixStore::ask(const StoreMessage& request, milliseconds patience) {
  const auto frame = encode(request);
  TORCH_CHECK_VALUE(frame, place(), ": expected a message of at most ",
                    format_bytes(kLargestStoreMessage), ", got a longer one");
  const std::lock_guard lock(mutex_);
  if (process_ != getpid()) socket_.reset();
  process_ = getpid();
  if (!socket_.is_open()) connect(std::min(patience, kReconnect));
  const auto deadline = Clock::now() + patience;
  send(*frame, deadline);
  const auto length = message_bytes(receive(kFrameHeader, deadline));
  auto answer = length ? decode(receive(*length, deadline)) : std::nullopt;
  if (!answer) fail("gave an answer that is none");
  if (answer->code == StoreCode::Refused) {
    C10_THROW_ERROR(DistStoreError,
                    c10::str(place(), " refused: ", answer->words.empty() ? "" : answer->words[0]));
  }
  return std::move(*answer);
}

void UnixStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  ask({.code = StoreCode::Set, .words = {key, to_text(value)}});
}

std::vector<uint8_t> UnixStore::compareSet(const std::string& key,
                                           const std::vector<uint8_t>& expected,
                                           const std::vector<uint8_t>& desired) {
  const auto answer =
      ask({.code = StoreCode::CompareSet, .words = {key, to_text(expected), to_text(desired)}});
  return answer.words.empty() ? std::vector<uint8_t>() : to_bytes(answer.words[0]);
}

std::vector<uint8_t> UnixStore::get(const std::string& key) { return multiGet({key})[0]; }

std::vector<std::vector<uint8_t>> UnixStore::multiGet(const std::vector<std::string>& keys) {
  wait(keys);
  const auto answer = ask({.code = StoreCode::Get, .words = keys});
  TORCH_CHECK_WITH(DistStoreError,
                   answer.code == StoreCode::Done && answer.words.size() == keys.size(), place(),
                   " has lost a key while it was read: ", c10::Join(", ", keys));
  std::vector<std::vector<uint8_t>> values;
  for (const auto& word : answer.words) values.push_back(to_bytes(word));
  return values;
}

void UnixStore::multiSet(const std::vector<std::string>& keys,
                         const std::vector<std::vector<uint8_t>>& values) {
  TORCH_CHECK_VALUE(keys.size() == values.size(), "multiSet: expected as many values as keys, got ",
                    keys.size(), " keys and ", values.size(), " values");
  StoreMessage request{.code = StoreCode::Set};
  for (size_t i = 0; i < keys.size(); ++i) {
    request.words.push_back(keys[i]);
    request.words.push_back(to_text(values[i]));
  }
  ask(request);
}

int64_t UnixStore::add(const std::string& key, int64_t value) {
  return ask({.code = StoreCode::Add, .number = value, .words = {key}}).number;
}

bool UnixStore::deleteKey(const std::string& key) {
  return ask({.code = StoreCode::Delete, .words = {key}}).number != 0;
}

bool UnixStore::check(const std::vector<std::string>& keys) {
  return ask({.code = StoreCode::Check, .words = keys}).number != 0;
}

int64_t UnixStore::getNumKeys() { return ask({.code = StoreCode::Count}).number; }

void UnixStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto patience = bounded(timeout);
  const auto answer =
      ask({.code = StoreCode::Wait, .number = patience.count(), .words = keys}, patience + kGrace);
  TORCH_CHECK_WITH(DistStoreError, answer.code == StoreCode::Done, place(), ": waited ",
                   format_seconds(static_cast<double>(patience.count()) / 1e3), " for ",
                   format_list(keys));
}

void UnixStore::append(const std::string& key, const std::vector<uint8_t>& value) {
  ask({.code = StoreCode::Append, .words = {key, to_text(value)}});
}

void UnixStore::queuePush(const std::string& key, const std::vector<uint8_t>& value) {
  ask({.code = StoreCode::Push, .words = {key, to_text(value)}});
}

std::vector<uint8_t> UnixStore::queuePop(const std::string& key, bool block) {
  while (true) {
    if (block) wait({key});
    const auto answer = ask({.code = StoreCode::Pop, .words = {key}});
    if (answer.code == StoreCode::Done && !answer.words.empty()) return to_bytes(answer.words[0]);
    TORCH_CHECK_WITH(DistQueueEmptyError, block, place(), ": the queue '", key, "' is empty");
  }
}

int64_t UnixStore::queueLen(const std::string& key) {
  return ask({.code = StoreCode::Length, .words = {key}}).number;
}

std::vector<std::string> UnixStore::listKeys() { return ask({.code = StoreCode::List}).words; }

}  // namespace tessera::comm
