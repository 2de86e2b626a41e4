// What the engines add to libtorch's words when memory runs out: which unit, how much, what to try.
#include <tessera/fully_shard.h>
#include <tessera/nn.h>
#include <tessera/replicate.h>

#include "support/message_of.h"
#include "support/ranks.h"

#include <c10/core/Allocator.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kSide = 512;
constexpr size_t kWeightBytes = kSide * kSide * sizeof(float);
constexpr size_t kParameterBytes = kWeightBytes + kSide * sizeof(float);

/// The CPU's memory, of which allocations of one size, once refuse() was called, find none left.
class ScarceMemory final : public c10::Allocator {
 public:
  ScarceMemory() : own_(c10::GetAllocator(at::kCPU)) {
    c10::SetAllocator(at::kCPU, this, kPriority);
  }
  ~ScarceMemory() override { c10::SetAllocator(at::kCPU, own_, kPriority); }

  void refuse(size_t bytes) { refused_ = bytes; }

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes != refused_, "no room for ", bytes, " bytes");
    return own_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return own_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    own_->copy_data(to, from, bytes);
  }

 private:
  static constexpr uint8_t kPriority = 2;
  c10::Allocator* own_;
  std::atomic<size_t> refused_ = SIZE_MAX;
};

/// Two ranks over gloo, which keeps no memory of its own for them.
void on_two_gloo_ranks(const RankBody& body) { run_threads(2, body, {.backend = "gloo"}); }

TEST(MemoryErrors, NameTheUnitThatIsGathered) {
  ScarceMemory memory;
  on_two_gloo_ranks([&] {
    nn::Linear net(kSide, kSide);
    fully_shard(net);
    barrier();
    memory.refuse(kParameterBytes);
    EXPECT_THAT(
        message_of<c10::OutOfMemoryError>([&] { net(at::ones({2, kSide})); }),
        AllOf(HasSubstr("no room for 1050624 bytes"),
              HasSubstr("fully_shard: expected 1.0 MiB on cpu for the gathered parameters of "),
              HasSubstr("LinearImpl; use smaller units")));
  });
}

TEST(MemoryErrors, NameTheUnitWhoseGradientsTravel) {
  ScarceMemory memory;
  on_two_gloo_ranks([&] {
    nn::Linear net(kSide, kSide);
    fully_shard(net);
    const auto loss = net(at::ones({2, kSide})).sum();
    barrier();
    memory.refuse(kWeightBytes / 2);  // what a rank gets of the weight's gradient
    EXPECT_THAT(message_of<c10::OutOfMemoryError>([&] { loss.backward(); }),
                AllOf(HasSubstr("no room for 524288 bytes"),
                      HasSubstr("fully_shard: expected room for 1.0 MiB of gradients of "),
                      HasSubstr("LinearImpl on their way; use smaller units")));
  });
}

TEST(MemoryErrors, NameTheModuleWhoseBucketsAreMade) {
  ScarceMemory memory;
  on_two_gloo_ranks([&] {
    nn::Linear net(kSide, kSide);
    replicate(net, {.init_sync = false});  // whose message is of the same size
    barrier();
    memory.refuse(kParameterBytes);
    EXPECT_THAT(message_of<c10::OutOfMemoryError>([&] { net(at::ones({2, kSide})); }),
                AllOf(HasSubstr("no room for 1050624 bytes"),
                      HasSubstr("replicate: expected 1.0 MiB for a bucket of 2 gradients of "),
                      HasSubstr("LinearImpl, 'weight' among them")));
  });
}

}  // namespace
}  // namespace tessera::testing
