// The store on a local socket: what it does, who is let in, and that nobody can break it.
#include "comm/unix_store.h"

#include "support/message_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <random>
#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::UnorderedElementsAre;
using UnixStorePtr = c10::intrusive_ptr<UnixStore>;

std::string fresh_name() {
  static int count = 0;
  return "tessera-test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

UnixStorePtr serve(const std::string& name, std::chrono::milliseconds timeout = 20s) {
  return c10::make_intrusive<UnixStore>(name, timeout,
                                        std::make_shared<StoreServer>(listen_locally(name)));
}

UnixStorePtr join(const std::string& name, std::chrono::milliseconds timeout = 20s) {
  return c10::make_intrusive<UnixStore>(name, timeout);
}

TEST(UnixStore, KeepsValuesForAllWhoConnect) {
  const auto name = fresh_name();
  const auto first = serve(name);
  const auto second = join(name);
  first->set("a", "1");
  EXPECT_EQ(second->get_to_str("a"), "1");
  second->set("a", std::string("\0x", 2));
  EXPECT_EQ(first->get_to_str("a"), std::string("\0x", 2));
  second->set("empty", "");
  EXPECT_EQ(first->get_to_str("empty"), "");
  EXPECT_TRUE(first->check({"a", "empty"}));
  EXPECT_FALSE(first->check({"a", "b"}));
  EXPECT_EQ(first->getNumKeys(), 2);
  EXPECT_THAT(first->listKeys(), UnorderedElementsAre("a", "empty"));
  EXPECT_TRUE(second->deleteKey("a"));
  EXPECT_FALSE(first->deleteKey("a"));
  EXPECT_FALSE(first->check({"a"}));
}

TEST(UnixStore, ChangesValuesAsTheOtherStoresDo) {
  const auto store = serve(fresh_name());
  EXPECT_EQ(store->compareSet("c", "x", "y"), "x") << "absent: not set";
  EXPECT_FALSE(store->check({"c"}));
  EXPECT_EQ(store->compareSet("c", "", "y"), "y");
  EXPECT_EQ(store->compareSet("c", "x", "z"), "y");
  EXPECT_EQ(store->compareSet("c", "y", "z"), "z");
  EXPECT_EQ(store->add("n", 5), 5);
  EXPECT_EQ(store->add("n", -7), -2);
  EXPECT_EQ(store->get_to_str("n"), "-2");
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store->add("c", 1); }),
              HasSubstr("the value of key 'c' is no number"));
  store->append("l", to_bytes("ab"));
  store->append("l", to_bytes("c"));
  EXPECT_EQ(store->get_to_str("l"), "abc");
  store->multiSet({"p", "q"}, {to_bytes("1"), to_bytes("2")});
  EXPECT_THAT(store->multiGet({"q", "p"}), ElementsAre(to_bytes("2"), to_bytes("1")));
  EXPECT_TRUE(store->hasExtendedApi());
}

TEST(UnixStore, HasQueues) {
  const auto store = serve(fresh_name());
  const auto other = store->clone();
  EXPECT_THAT(message_of<c10::DistQueueEmptyError>([&] { store->queuePop("q", false); }),
              HasSubstr("'q' is empty"));
  std::thread pusher([&] {
    other->queuePush("q", to_bytes("1"));
    other->queuePush("q", to_bytes("2"));
  });
  EXPECT_EQ(store->queuePop("q", true), to_bytes("1"));
  EXPECT_EQ(store->queuePop("q", true), to_bytes("2"));
  pusher.join();
  EXPECT_EQ(store->queueLen("q"), 0);
}

TEST(UnixStore, WaitsForKeysAndNotLonger) {
  const auto name = fresh_name();
  const auto store = serve(name);
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store->wait({"a", "b"}, 50ms); }),
              HasSubstr("waited 50 ms for 'a' and 'b'"));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 10s);
  const auto other = join(name);
  std::thread setter([&] {
    other->set("b", "1");
    other->set("a", "2");
  });
  store->wait({"a", "b"}, 20s);
  EXPECT_EQ(store->get_to_str("a"), "2");
  setter.join();
  store->setTimeout(30ms);
  EXPECT_THROW(store->get("c"), c10::DistStoreError);
}

TEST(UnixStore, CountsEveryRankOnce) {
  const auto name = fresh_name();
  const auto store = serve(name);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 16; ++rank) {
    ranks.emplace_back([&] {
      const auto own = join(name);
      for (int i = 0; i < 50; ++i) own->add("count", 1);
      own->add("arrived", 1) == 16 ? own->set("all", "yes") : own->wait({"all"}, 20s);
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(store->add("count", 0), 16 * 50);
}

TEST(UnixStore, TellsThatItIsGone) {
  const auto name = fresh_name();
  auto server = serve(name);
  const auto client = join(name);
  client->set("a", "1");
  server.reset();
  EXPECT_THAT(message_of<c10::Error>([&] { client->get("a"); }),
              HasSubstr("the store at unix://@" + name));
  EXPECT_THAT(message_of<c10::DistNetworkError>([&] { join(name, 50ms); }),
              HasSubstr("can't be reached within 50 ms"));
}

/// Runs `body` in a process of another user; whether it returned true.
bool as_nobody(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(setgid(65534) == 0 && setuid(65534) == 0 && body() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Whether the other end says nothing and closes.
bool is_turned_away(const LocalSocket& connection) {
  const auto frame = encode({.code = StoreCode::Count});
  send(connection.get(), frame->data(), frame->size(), MSG_NOSIGNAL);
  char byte = 0;
  ssize_t count = -1;
  for (int i = 0; i < 1000 && count < 0; ++i) {
    count = recv(connection.get(), &byte, 1, 0);
    if (count < 0 && errno != EAGAIN) return errno == ECONNRESET || errno == EPIPE;
    std::this_thread::sleep_for(5ms);
  }
  return count == 0;
}

TEST(UnixStore, LetsNoOtherUserIn) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const auto name = fresh_name();
  const auto store = serve(name);
  store->set("a", "1");
  EXPECT_TRUE(as_nobody([&] { return is_turned_away(connect_locally(name)); }));
  EXPECT_EQ(store->get_to_str("a"), "1");
}

TEST(UnixStore, TrustsNoOtherUsersServer) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const auto name = fresh_name();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(1);
    const auto listener = listen_locally(name);
    close(ends[1]);
    pause();
    _exit(listener.is_open() ? 0 : 1);
  }
  close(ends[1]);
  char byte = 0;
  EXPECT_EQ(read(ends[0], &byte, 1), 0);
  EXPECT_THAT(message_of<c10::DistNetworkError>([&] { join(name, 5s); }),
              HasSubstr("belongs to another user"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  close(ends[0]);
}

TEST(UnixStore, OutlivesClientsThatSendAnything) {
  const auto name = fresh_name();
  const auto store = serve(name);
  store->set("kept", "yes");
  std::mt19937 draw(7);
  for (int i = 0; i < 300; ++i) {
    const auto client = connect_locally(name);
    ASSERT_TRUE(client.is_open());
    std::string bytes;
    if (i % 3 != 0) {
      bytes =
          *encode({.code = static_cast<StoreCode>(draw() % 20),
                   .number = static_cast<int64_t>(draw()) << 32,
                   .words = std::vector<std::string>(draw() % 4, std::string(draw() % 9, 'k'))});
      if (i % 3 == 1) bytes[draw() % bytes.size()] = static_cast<char>(draw());
    } else {
      for (unsigned length = draw() % 64; bytes.size() < length;)
        bytes += static_cast<char>(draw());
    }
    send(client.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  EXPECT_EQ(store->get_to_str("kept"), "yes");
}

TEST(UnixStore, BoundsWhatItTakes) {
  const auto name = fresh_name();
  const auto store = c10::make_intrusive<UnixStore>(
      name, 20s, std::make_shared<StoreServer>(listen_locally(name), size_t{1} << 20));
  const std::vector<uint8_t> large(kLargestStoreMessage);
  EXPECT_THAT(message_of<c10::ValueError>([&] { store->set("a", large); }),
              HasSubstr("expected a message of at most 64 MiB"));
  const std::vector<uint8_t> some(size_t{100} << 10);
  EXPECT_THAT(message_of<c10::DistStoreError>([&] {
                for (int i = 0; i < 40; ++i) store->append("b" + std::to_string(i), some);
              }),
              HasSubstr("refused: the store is full"));
  store->deleteKey("b0");
  store->set("a", "1");
  EXPECT_EQ(store->get_to_str("a"), "1");
}

TEST(StoreWire, ReadsBackWhatItWroteAndNothingElse) {
  const StoreMessage message{.code = StoreCode::Set, .number = -5, .words = {"a", "", "xyz"}};
  const auto frame = *encode(message);
  ASSERT_EQ(message_bytes(frame), frame.size() - kFrameHeader);
  const auto body = frame.substr(kFrameHeader);
  const auto read = decode(body);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->number, -5);
  EXPECT_EQ(read->words, message.words);
  for (size_t length = 0; length < body.size(); ++length)
    EXPECT_FALSE(decode(body.substr(0, length))) << length;
  EXPECT_FALSE(decode(body + "x"));
  EXPECT_FALSE(message_bytes("\xff\xff\xff\xff"));
}

}  // namespace
}  // namespace tessera::comm
