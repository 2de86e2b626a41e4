// What a rank reads from the store may be anybody's words: errors that name rank and field.
#include "comm/backends.h"
#include "comm/peer_process.h"
#include "comm/rendezvous.h"
#include "comm/shm/shared_memory.h"
#include "support/message_of.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <unistd.h>

#include <sstream>
#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using Words = std::vector<std::string>;

enum Field { kHost, kPid, kDescriptor, kCapacity, kOffset, kVersion, kBlock };

Words words_of(const std::string& text) {
  std::istringstream in(text);
  Words words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

std::string text_of(const Words& words) { return c10::Join(" ", words); }

/// A process that has this one's memory under the same descriptor, and waits.
class Twin {
 public:
  Twin() : pid_(fork()) {
    if (pid_ == 0) {
      pause();
      _exit(0);
    }
  }
  ~Twin() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::string pid() const { return std::to_string(pid_); }

 private:
  pid_t pid_;
};

/// What rank 0 of a group of two says when rank 1's address is what `forge` makes of rank 0's own.
std::string forgery_error(const std::function<std::string(Words)>& forge) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::thread forger([&] {
    store->wait({"shm/0"}, 20s);
    store->set("shm/1", forge(words_of(store->get_to_str("shm/0"))));
    store->set("mapped/1", "mapped");
  });
  const auto error = message_of<c10::DistBackendError>([&] {
    shm::make({.store = store,
               .rank = 0,
               .size = 2,
               .group_name = "g",
               .world_ranks = {},
               .timeout = 20s});
  });
  forger.join();
  return error;
}

std::string error_with(Field field, const std::string& value, const std::string& pid = {}) {
  return forgery_error([&](Words words) {
    if (!pid.empty()) words[kPid] = pid;
    words[field] = value;
    return text_of(words);
  });
}

auto names(const std::string& field) {
  return AllOf(HasSubstr("group 'g': rank 1: " + field + " of its memory in the store"));
}

TEST(ForgedAddress, IsNoAddress) {
  for (const char* text : {"", " ", "a b c", "a b c d e f g", "1 2 3 4 5 6 7 8 9"}) {
    EXPECT_THAT(forgery_error([&](const Words&) { return text; }), HasSubstr("group 'g': rank 1"))
        << text;
  }
  EXPECT_THAT(forgery_error([](const Words&) { return std::string(1 << 20, '7'); }),
              names("length"));
}

TEST(ForgedAddress, OfAnotherHostOrVersion) {
  EXPECT_THAT(error_with(kHost, "elsewhere"), HasSubstr("rank 1 is on another host"));
  EXPECT_THAT(error_with(kVersion, "9999"), HasSubstr("rank 1 runs another version"));
  EXPECT_THAT(error_with(kBlock, "4096"), HasSubstr("rank 1 runs another version"));
  EXPECT_THAT(error_with(kBlock, "-1"), names("size of block"));
}

TEST(ForgedAddress, OfNoProcessOfOurs) {
  for (const char* pid : {"0", "-1", "99999999999999999999", "x", "1x"})
    EXPECT_THAT(error_with(kPid, pid), names("pid")) << pid;
  EXPECT_THAT(error_with(kPid, "2147483647"), HasSubstr("rank 1: shm: expected to open /proc/"));
  if (geteuid() != 0) {
    EXPECT_THAT(error_with(kPid, "1"), names("pid"));
    return;
  }
  const pid_t stranger = fork();
  if (stranger == 0) {
    if (setgid(65534) == 0 && setuid(65534) == 0) pause();
    _exit(1);
  }
  while (!is_of_another_user(stranger)) std::this_thread::sleep_for(1ms);
  EXPECT_THAT(error_with(kPid, std::to_string(stranger)), names("pid"));
  kill(stranger, SIGKILL);
  waitpid(stranger, nullptr, 0);
}

TEST(ForgedAddress, OfDescriptorsThatAreNoMemory) {
  const auto arena = shm::Arena::own();
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const int unsealed = memfd_create("tessera", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(unsealed, static_cast<off_t>(arena->capacity())), 0);
  const Twin twin;
  for (const int descriptor : {0, pipe_ends[0], 1 << 20}) {
    EXPECT_THAT(error_with(kDescriptor, std::to_string(descriptor), twin.pid()),
                HasSubstr("group 'g': rank 1: shm: "))
        << descriptor;
  }
  EXPECT_THAT(error_with(kDescriptor, std::to_string(unsealed), twin.pid()),
              HasSubstr("expected sealed memory"));
  EXPECT_THAT(error_with(kDescriptor, "-1", twin.pid()), names("descriptor"));
  EXPECT_THAT(error_with(kDescriptor, std::to_string(unsealed)),
              HasSubstr("not those of this process's own arena"));
  close(unsealed);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST(ForgedAddress, BeyondTheMemory) {
  const auto arena = shm::Arena::own();
  const Twin twin;
  const auto larger = std::to_string(arena->capacity() + shm::Arena::kPage);
  EXPECT_THAT(error_with(kCapacity, larger, twin.pid()), HasSubstr("rank 1: shm: descriptor "));
  EXPECT_THAT(error_with(kCapacity, larger), HasSubstr("this process's own arena"));
  for (const char* capacity : {"0", "4096", "12345", "18446744073709551615", "-4096"})
    EXPECT_THAT(error_with(kCapacity, capacity, twin.pid()), names("capacity")) << capacity;
  const auto capacity = std::to_string(arena->capacity());
  for (const auto& offset : {std::string("1"), capacity, std::string("18446744073709551615"),
                             std::string("9223372036854771712"), std::string("-4096")})
    EXPECT_THAT(error_with(kOffset, offset, twin.pid()), names("offset")) << offset;
  const auto hole = std::to_string(arena->capacity() / 2 / shm::Arena::kPage * shm::Arena::kPage);
  EXPECT_THAT(error_with(kOffset, hole, twin.pid()), names("offset"));
  EXPECT_THAT(error_with(kOffset, hole), names("offset"));
}

/// The error of joining a world of two in which rank 1 says `whereabouts` of itself.
std::string world_error_with(const std::string& whereabouts) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  const std::string world = "tessera/world/0/";
  store->set(world + "host/1", whereabouts);
  store->add(world + "arrived", 1);
  return message_of<c10::DistStoreError>(
      [&] { join_world(store, {.rank = 0, .world_size = 2}, 20s); });
}

TEST(ForgedAddress, OfARankOfTheWorld) {
  EXPECT_THAT(world_error_with(""), HasSubstr("rank 1: expected pid, host and network"));
  EXPECT_THAT(world_error_with(std::string(1 << 20, 'x')), HasSubstr("rank 1: expected pid"));
  for (const char* pid : {"x", "0", "-5", "99999999999"})
    EXPECT_THAT(world_error_with(std::string(pid) + " host net name"),
                HasSubstr("init: rank 1: pid in the store: expected a process"))
        << pid;
}

TEST(MemoryFile, CantBeShrunkUnderAMapping) {
  const auto arena = shm::Arena::own();
  EXPECT_NE(ftruncate(arena->descriptor(), 0), 0);
  EXPECT_EQ(errno, EPERM);
}

}  // namespace
}  // namespace tessera::comm
