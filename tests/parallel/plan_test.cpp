// What plans mean.
#include "parallel/models.h"
#include "parallel/warnings.h"
#include "support/ranks.h"

#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Writes down what it is applied to.
class Note final : public ParallelStyle {
 public:
  Note(std::string name, std::vector<std::string>& notes) : name_(std::move(name)), notes_(notes) {}
  void apply(const StyleTarget& target) const override {
    notes_.push_back(name_ + ":" + target.path);
  }

 private:
  std::string name_;
  std::vector<std::string>& notes_;
};

class PlanOnThreads : public ::testing::Test {
 protected:
  const FakeWorld world_{0, 4};
  const DeviceMesh mesh_ = mesh_of_all();
  std::vector<std::string> notes_;
};

TEST_F(PlanOnThreads, WithoutAMeshThatInForceIsTaken) {
  MlpModule net, inner;
  const ParallelPlan plan = {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}};
  EXPECT_FALSE(current_mesh());
  {
    const MeshScope scope(mesh_);
    parallelize_module(net, plan, {.src_data_rank = std::nullopt});
    {
      const DeviceMesh pair(torch::kCPU, {0, 1});
      const MeshScope nested(pair);
      EXPECT_EQ(*current_mesh(), pair);
      parallelize_module(inner, plan, {.src_data_rank = std::nullopt});
    }
    EXPECT_EQ(*current_mesh(), mesh_);
  }
  EXPECT_FALSE(current_mesh());
  EXPECT_EQ(DTensor::of(net->net1->weight).mesh(), mesh_);
  EXPECT_EQ(DTensor::of(inner->net1->weight).mesh().size(), 2);
}

TEST_F(PlanOnThreads, EntriesAreAppliedInOrderToAllTheyName) {
  MlpStacked net(3);
  parallelize_module(net, mesh_,
                     {{"layers.*.net2", Note("a", notes_)},
                      {"layers.[!1].net?", Note("b", notes_)},
                      {"layers.1", Note("c", notes_)}});
  EXPECT_THAT(notes_, ElementsAre("a:layers.0.net2", "a:layers.1.net2", "a:layers.2.net2",
                                  "b:layers.0.net1", "b:layers.0.net2", "b:layers.2.net1",
                                  "b:layers.2.net2", "c:layers.1"));
}

TEST_F(PlanOnThreads, StarsDoNotCrossDots) {
  MlpStacked net(2);
  const CaughtWarnings caught;
  parallelize_module(net, mesh_, {{"*", Note("a", notes_)}, {"*.net1", Note("b", notes_)}});
  EXPECT_THAT(notes_, ElementsAre("a:layers"));
  EXPECT_EQ(caught.texts.size(), 1U);
}

TEST_F(PlanOnThreads, LaterComponentsAreNotTriedOnTheSameModule) {
  // A child of the root has the name of a grandchild.
  nn::Sequential net;
  net->push_back("net1", MlpModule());
  net->push_back("net2", nn::Linear(10, 10));
  parallelize_module(net, mesh_, {{"net1.net2", Note("a", notes_)}});
  EXPECT_THAT(notes_, ElementsAre("a:net1.net2"));
}

TEST_F(PlanOnThreads, OneStyleOrAnEmptyPatternMeansTheModuleItself) {
  MlpModule net;
  parallelize_module(net, mesh_, Note("a", notes_));
  parallelize_module(net, mesh_, {{"", Note("b", notes_)}});
  EXPECT_THAT(notes_, ElementsAre("a:", "b:"));
}

TEST_F(PlanOnThreads, AModuleWithTwoNamesIsTakenOncePerEntry) {
  nn::Sequential net;
  nn::Linear shared(3, 3);
  net->push_back("a", shared);
  net->push_back("b", shared);
  parallelize_module(net, mesh_, {{"*", Note("x", notes_)}});
  EXPECT_THAT(notes_, ElementsAre("x:a"));
}

TEST_F(PlanOnThreads, WarnsOfAnEntryThatNamesNothing) {
  MlpStacked net(2);
  const CaughtWarnings caught;
  parallelize_module(net, mesh_,
                     {{"layers.*.nett1", Note("a", notes_)},
                      {"layer.0", Note("b", notes_)},
                      {"layers.0.net1", Note("c", notes_)}});
  EXPECT_THAT(notes_, ElementsAre("c:layers.0.net1")) << "the others go on";
  EXPECT_THAT(caught.texts,
              ElementsAre(AllOf(HasSubstr("plan entry 'layers.*.nett1'"),
                                HasSubstr("'nett1' matches no child of 'layers.0' and 1 others"),
                                HasSubstr("'net1', 'net2' and 'relu'")),
                          AllOf(HasSubstr("plan entry 'layer.0'"), HasSubstr("'layer'"),
                                HasSubstr("nearest names: 'layers'"))));
}

TEST_F(PlanOnThreads, WarnsWithoutAPlan) {
  MlpModule net;
  const CaughtWarnings caught;
  parallelize_module(net, mesh_);
  parallelize_module(net, mesh_, nullptr);
  parallelize_module(net, mesh_, {});
  EXPECT_THAT(caught.texts, ::testing::Each(HasSubstr("parallelize_module: no plan for")));
  EXPECT_EQ(caught.texts.size(), 3U);
  EXPECT_FALSE(is_dtensor(net->net1->weight));
}

TEST_F(PlanOnThreads, ReturnsWhatItWasGiven) {
  MlpModule holder;
  auto pointer = holder.ptr();
  auto& same_holder = parallelize_module(holder, mesh_, Note("a", notes_));
  EXPECT_EQ(&same_holder, &holder);
  auto& same_pointer = parallelize_module(pointer, mesh_, Note("a", notes_));
  EXPECT_EQ(&same_pointer, &pointer);
  auto& same_module = parallelize_module(*holder, mesh_, Note("a", notes_));
  EXPECT_EQ(&same_module, pointer.get());
  holder->net1 = parallelize_module(std::move(holder->net1), mesh_, Note("a", notes_));
  EXPECT_FALSE(holder->net1.is_empty());
}

TEST_F(PlanOnThreads, PlansCanBeBuilt) {
  std::vector<PlanEntry> entries;
  const StylePtr style = Note("a", notes_);
  for (int i = 0; i < 2; ++i) entries.push_back({"layers." + std::to_string(i), style});
  parallelize_module(MlpStacked(2), mesh_, entries);
  EXPECT_THAT(notes_, ElementsAre("a:layers.0", "a:layers.1"));
}

}  // namespace
}  // namespace tessera::testing
