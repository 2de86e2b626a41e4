// Views whose parts had to be moved: they do not share memory with their base, and must not pretend
// to.
#include "dtensor/placed.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

const char* const kStale = "whose base has been written to since";

at::Tensor uneven(const DeviceMesh& mesh) { return placed(numbered({5, 4}), mesh, {Shard(0)}); }

TEST(LostViewsOnThreads, AreNotReadAfterTheirBaseHasChanged) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto base = uneven(mesh);
    const auto view = base.view({20});
    const auto of_view = view.narrow(0, 2, 9);
    const auto detached = view.detach();
    expect_equal(full_of(view), numbered({20}), "before");
    base.add_(1);
    const std::vector<std::pair<const char*, std::function<void()>>> uses = {
        {"operator", [&] { view + 1; }},
        {"view of it", [&] { view.narrow(0, 0, 3); }},
        {"view made before", [&] { of_view.sum(); }},
        {"detached before", [&] { detached.sum(); }},
        {"list", [&] { at::_foreach_add({view}, 1); }},
        {"part", [&] { DTensor::of(view).to_local(); }},
        {"whole", [&] { full_of(view); }},
        {"redistribute", [&] { DTensor::of(of_view).redistribute({Shard(0)}); }},
    };
    for (const auto& [name, use] : uses)
      EXPECT_THAT(message_of<c10::Error>(use), HasSubstr(kStale)) << name;
    expect_equal(full_of(base.view({20})), numbered({20}) + 1, "taken again");
  });
}

TEST(LostViewsOnThreads, SeeWritesOfOptimizersAndToTheParts) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto parameter = numbered({5, 4}).requires_grad_();
    distribute_tensor_(parameter, mesh, {Shard(0)}, std::nullopt);
    torch::optim::SGD optimizer({parameter}, 0.1);
    const auto view = parameter.view({20});
    view.sum().backward();
    optimizer.step();
    EXPECT_THAT(message_of<c10::Error>([&] { view.sum(); }), HasSubstr(kStale));
    expect_equal(full_of(parameter.view({20}).sum()), (numbered({20}) - 0.1).sum(), "taken again",
                 Tolerance{1e-4, 1e-4});

    const auto base = uneven(mesh);
    const auto other = base.view({20});
    DTensor::of(base).to_local().zero_();
    EXPECT_THAT(message_of<c10::Error>([&] { other.sum(); }), HasSubstr(kStale));
  });
}

TEST(LostViewsOnThreads, AreNotWrittenAsElementsOfLists) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto base = uneven(mesh);
    std::vector<at::Tensor> views{base.view({20})};
    EXPECT_THAT(message_of<c10::Error>([&] { at::_foreach_mul_(views, 2); }),
                HasSubstr("had to be moved between ranks"));
    auto detached = base.view({20}).detach();
    EXPECT_THAT(message_of<c10::Error>([&] { detached.mul_(2); }),
                HasSubstr("had to be moved between ranks"));
    expect_equal(full_of(base), numbered({5, 4}), "nothing was written");
  });
}

TEST(LostViewsOnThreads, GradientsThatWereViewsCanBeWritten) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto leaf = at::Tensor(placed(numbered({20}), mesh, {Shard(0)})).requires_grad_();
    const auto weight = uneven(mesh);
    for (int step = 0; step < 3; ++step) (leaf.view({5, 4}) * weight).sum().backward();
    leaf.mutable_grad().mul_(2);
    expect_equal(full_of(leaf.grad()), numbered({20}) * 6, "", Tolerance{1e-5, 1e-5});
  });
}

}  // namespace
}  // namespace tessera::testing
