#include "support/beacon.h"

#include "support/temporary_folder.h"

#include <gtest/gtest.h>

#include <thread>

namespace tessera::testing {

namespace {

TEST(Beacon, IsSeenByWhoeverAsksLater) {
  const TemporaryFolder folder;
  const Beacon beacon(folder.path(), "lit");
  EXPECT_FALSE(beacon.signalled());
  EXPECT_FALSE(beacon.wait(std::chrono::milliseconds(20)));
  beacon.signal();
  beacon.signal();
  EXPECT_TRUE(beacon.wait(std::chrono::milliseconds(0)));
  EXPECT_FALSE(Beacon(folder.path(), "other").signalled());
}

TEST(Beacon, WakesWhoeverWaits) {
  const TemporaryFolder folder;
  const Beacon ready(folder.path(), "ready");
  const Beacon go(folder.path(), "go");
  std::thread waiter([&] {
    ready.signal();
    EXPECT_TRUE(go.wait());
  });
  EXPECT_TRUE(ready.wait());
  go.signal();
  waiter.join();
}

TEST(Beacon, NeedsARunWhenGivenOnlyAName) { EXPECT_THROW(Beacon("alone"), std::logic_error); }

}  // namespace

}  // namespace tessera::testing
