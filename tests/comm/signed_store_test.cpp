// Values that carry a MAC, in stores that others can write to.
#include "comm/signed_store.h"

#include "comm/rendezvous.h"
#include "comm/store_protocol.h"
#include "support/message_of.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <thread>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

const std::string kSecret = "sixteen letters!";

std::string hex(const Digest& digest) {
  std::string text;
  for (const auto byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// Examples of FIPS 180-4 and of RFC 4231.
TEST(Hmac, GivesThePublishedDigests) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(std::string(131, '\xaa'),
                            "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(SignedStore, GivesBackWhatItTook) {
  const auto plain = c10::make_intrusive<c10d::HashStore>();
  SignedStore store(plain, kSecret);
  store.set("a", "value");
  EXPECT_EQ(store.get_to_str("a"), "value");
  EXPECT_NE(to_text(plain->get("a")), "value");
  store.set("empty", "");
  EXPECT_EQ(store.get_to_str("empty"), "");
  EXPECT_EQ(store.compareSet("c", "x", "y"), "x");
  EXPECT_EQ(store.compareSet("c", "", "y"), "y");
  EXPECT_EQ(store.compareSet("c", "x", "z"), "y");
  EXPECT_EQ(store.compareSet("c", "y", "z"), "z");
  store.append("l", to_bytes("ab"));
  store.append("l", to_bytes("c"));
  store.multiSet({"p", "q"}, {to_bytes("1"), to_bytes("2")});
  EXPECT_EQ(store.multiGet({"l", "q"}), (std::vector{to_bytes("abc"), to_bytes("2")}));
  EXPECT_EQ(store.clone()->add("n", 4), 4);
  EXPECT_EQ(store.add("n", -1), 3);
}

TEST(SignedStore, CountsEveryRankOnce) {
  SignedStore store(c10::make_intrusive<c10d::HashStore>(), kSecret);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 8; ++rank) {
    ranks.emplace_back([&] {
      for (int i = 0; i < 50; ++i) store.add("n", 1);
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(store.add("n", 0), 8 * 50);
}

TEST(SignedStore, NamesTheKeyOfAForgedValue) {
  const auto plain = c10::make_intrusive<c10d::HashStore>();
  SignedStore store(plain, kSecret);
  const auto forged = AllOf(HasSubstr("the value of key 'k' in the store does not carry the MAC"),
                            HasSubstr("TESSERA_JOB_SECRET"));
  const auto read = [&] { store.get("k"); };
  plain->set("k", to_bytes("something"));
  EXPECT_THAT(message_of<c10::DistStoreError>(read), forged);
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store.add("k", 1); }), forged);
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store.multiGet({"k"}); }), forged);
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { store.compareSet("k", "", "x"); }), forged);
  store.set("other", "value");
  plain->set("k", plain->get("other"));  // a true value under another key
  EXPECT_THAT(message_of<c10::DistStoreError>(read), forged);
  store.set("k", "value");
  auto changed = plain->get("k");
  changed[0] ^= 1;
  plain->set("k", changed);
  EXPECT_THAT(message_of<c10::DistStoreError>(read), forged);
  SignedStore(plain, "another secret, long enough").set("k", "value");
  EXPECT_THAT(message_of<c10::DistStoreError>(read), forged);
}

TEST(SignedStore, RefusesAShortSecret) {
  EXPECT_THAT(message_of([] { SignedStore(c10::make_intrusive<c10d::HashStore>(), "short"); }),
              HasSubstr("expected at least 16 characters in TESSERA_JOB_SECRET, got 5"));
}

TEST(SignedStore, HoldsTheWorldOfRanksThatShareASecret) {
  const auto plain = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const Launch launch{.rank = rank, .world_size = 2, .job_secret = kSecret};
      const auto world = join_world(plain, launch, 20s);
      EXPECT_EQ(world.local_world_size, 2);
      leave_world(world, 5s);
    });
  }
  for (auto& rank : ranks) rank.join();
  const Launch other{.rank = 0, .world_size = 2, .job_secret = "another secret, long enough"};
  plain->deleteKey("tessera/world/0/left/0");
  EXPECT_THAT(message_of<c10::DistStoreError>([&] { join_world(plain, other, 1s); }),
              HasSubstr("tessera/world/0/size"));
}

}  // namespace
}  // namespace tessera::comm
