#include "dtensor/placed.h"
#include "parallel/warnings.h"
#include "support/message_of.h"

#include <gmock/gmock.h>

#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// One of four ranks: these checks need no others.
class DTensorErrors : public ::testing::Test {
 protected:
  DTensor rows() const { return DTensor::from_local(numbered({2, 3}), mesh_, {Shard(0)}); }

  const FakeWorld world_{0, 4};
  const DeviceMesh mesh_ = init_device_mesh(torch::kCPU, {4});
  const DeviceMesh square_ = init_device_mesh(torch::kCPU, {2, 2});
};

TEST_F(DTensorErrors, PlainTensorsWhereDistributedOnesAreExpected) {
  const auto plain = torch::ones({2, 3});
  EXPECT_THAT(
      message_of<c10::TypeError>([&] { DTensor::of(plain); }),
      AllOf(HasSubstr("DTensor::of: expected a distributed tensor, got a plain one of sizes "
                      "[2, 3]"),
            HasSubstr("distribute_tensor")));
  EXPECT_THAT(message_of<c10::TypeError>([] { DTensor().full_tensor(); }),
              HasSubstr("got an undefined one"));
  EXPECT_THAT(message_of<c10::TypeError>([&] { visualize_sharding(plain); }),
              HasSubstr("expected a distributed tensor"));
}

TEST_F(DTensorErrors, FromLocal) {
  const auto local = torch::ones({2, 3});
  const auto from = [&](const at::Tensor& tensor, Placements placements,
                        FromLocalOptions options = {}) {
    return message_of([&] { DTensor::from_local(tensor, mesh_, placements, options); });
  };
  EXPECT_THAT(from({}, {}), HasSubstr("DTensor::from_local: expected a tensor, got an undefined"));
  EXPECT_THAT(from(rows(), {}), HasSubstr("expected a plain tensor, got a distributed one"));
  EXPECT_THAT(from(local.to_sparse(), {}), HasSubstr("expected a dense tensor, got layout Sparse"));
  EXPECT_THAT(from(local, {}, {.shape = Sizes{8, 3}}), HasSubstr("got a shape alone"));
  EXPECT_THAT(from(local, {}, {.stride = Sizes{3, 1}}), HasSubstr("got a stride alone"));
  EXPECT_THAT(from(local, {}, {.shape = Sizes{8}, .stride = Sizes{1}}),
              HasSubstr("expected a shape and a stride of the local tensor's 2 dimensions"));
  EXPECT_THAT(from(local, {Shard(0)}, {.shape = Sizes{9, 3}, .stride = Sizes{3, 1}}),
              AllOf(HasSubstr("expected a local tensor of sizes [3, 3], rank 0's part of [9, 3]"),
                    HasSubstr("got [2, 3]")));
  EXPECT_THAT(from(local, {Shard(0), Shard(1)}),
              HasSubstr("expected one placement per mesh dimension, 1, got 2"));
  EXPECT_THAT(from(local, {Shard(2)}),
              HasSubstr("expected a shard of one of the tensor's 2 dimensions, got Shard(2)"));
  EXPECT_THAT(from(local, {Shard(-3)}), HasSubstr("got Shard(-3)"));
  EXPECT_THAT(message_of([&] { DTensor::from_local(local, mesh_, {StridedShard(0, 2)}); }),
              AllOf(HasSubstr("expected placements of a mesh of shape"),
                    HasSubstr("these would mean [Shard(0)]")));
  EXPECT_THAT(
      message_of([&] { DTensor::from_local(local, square_, {Partial("max"), Partial("sum")}); }),
      HasSubstr("expected Partial placements of one operation"));
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] {
                DTensor::from_local(local, square_, {StridedShard(0, 2), Shard(0)},
                                    {.run_check = true});
              }),
              HasSubstr("run_check can't join StridedShard(0, 2); pass shape and stride"));
}

TEST_F(DTensorErrors, Redistribute) {
  EXPECT_THAT(message_of([&] { rows().redistribute({Partial()}); }),
              AllOf(HasSubstr("DTensor::redistribute: expected Shard or Replicate on mesh "
                              "dimension 0, got Partial(sum)"),
                    HasSubstr("[Shard(0)]")));
  EXPECT_THAT(message_of([&] { rows().redistribute({Shard(0), Shard(0)}); }),
              HasSubstr("DTensor::redistribute: expected one placement per mesh dimension"));
  EXPECT_THAT(message_of<c10::NotImplementedError>(
                  [&] { rows().redistribute(square_, {Shard(0), Shard(0)}); }),
              AllOf(HasSubstr("DTensor::redistribute: expected the tensor's own mesh"),
                    HasSubstr("full_tensor()")));
}

TEST_F(DTensorErrors, DistributeTensor) {
  const auto distribute = [&](const at::Tensor& tensor, Placements placements = {},
                              std::optional<int> source = 0) {
    return message_of([&] { distribute_tensor(tensor, mesh_, placements, source); });
  };
  EXPECT_THAT(distribute({}), HasSubstr("distribute_tensor: expected a tensor, got an undefined"));
  EXPECT_THAT(distribute(torch::ones({8}, torch::kMeta)),
              HasSubstr("distribute_tensor: expected a tensor with values for rank 0 to send"));
  EXPECT_THAT(distribute(rows()),
              AllOf(HasSubstr("got one distributed as [Shard(0)]"), HasSubstr("redistribute")));
  EXPECT_THAT(distribute(torch::ones({2}, torch::requires_grad()) * 2),
              AllOf(HasSubstr("expected a leaf tensor, got a result of MulBackward"),
                    HasSubstr("DTensor::from_local")));
  EXPECT_THAT(distribute(torch::ones({4}), {}, 4),
              HasSubstr("expected a src_data_rank from 0 to 3, an index along mesh dimension 0"));
  EXPECT_THAT(distribute(torch::ones({4}), {}, -1), HasSubstr("got -1"));
  EXPECT_THAT(distribute(torch::ones({4}), {Replicate(), Replicate()}), HasSubstr("1, got 2"));
  EXPECT_THAT(message_of([&] { distribute_tensor_(rows(), mesh_); }),
              HasSubstr("distribute_tensor_: expected a plain tensor"));
}

TEST_F(DTensorErrors, PlacementsAndFactories) {
  EXPECT_THAT(message_of([] { Partial("mean"); }),
              HasSubstr("Partial: expected sum, avg, min, max, product, band, bor or bxor, got "
                        "'mean'"));
  EXPECT_THAT(message_of([] { StridedShard(0, 0); }),
              HasSubstr("StridedShard: expected a split factor of at least 1, got 0"));
  EXPECT_THAT(message_of([] { Shard(1 << 20); }),
              HasSubstr("Shard: expected a tensor dimension, got 1048576"));
  EXPECT_THAT(message_of([&] { dtensor::zeros({4}, mesh_, {Partial()}); }),
              HasSubstr("expected Shard or Replicate, got [Partial(sum)]"));
  EXPECT_THAT(message_of([&] { dtensor::randn({-4}, mesh_); }),
              HasSubstr("dtensor::randn: expected sizes that are not negative, got [-4]"));
  EXPECT_THAT(message_of([&] { visualize_sharding(dtensor::zeros({2, 2, 2}, mesh_)); }),
              HasSubstr("visualize_sharding: expected a tensor of 1 or 2 dimensions, got 3"));
}

TEST_F(DTensorErrors, MixesOfPlainAndDistributed) {
  const auto tensor = rows();
  const auto plain = torch::ones({8, 3});
  EXPECT_THAT(message_of<c10::Error>([&] { tensor + plain; }),
              AllOf(HasSubstr("aten::add: got a mix of distributed and plain tensors: argument "
                              "'other' is a plain tensor of sizes [8, 3]"),
                    HasSubstr("ImplicitReplication")));
  EXPECT_THAT(message_of<c10::Error>([&] { torch::mm(torch::ones({2, 8}), tensor); }),
              HasSubstr("argument 'self' is a plain tensor of sizes [2, 8]"));
  EXPECT_THAT(message_of<c10::Error>([&] { torch::cat({tensor, plain}); }),
              HasSubstr("a plain tensor of sizes [8, 3]"));
  EXPECT_THAT(message_of<c10::Error>([&] { torch::ones({8, 3}).add_(tensor); }),
              HasSubstr("got a mix of distributed and plain tensors"));
  EXPECT_EQ((tensor + torch::tensor(1.0)).sizes(), tensor.sizes()) << "numbers are no mix";
  {
    const ImplicitReplication scope;
    const auto sum = DTensor::of(tensor + plain);
    EXPECT_EQ(sum.placements(), Placements{Shard(0)});
    expect_equal(sum.to_local(), numbered({2, 3}) + 1);
    const ImplicitReplication inner;
  }
  EXPECT_THAT(message_of<c10::Error>([&] { tensor + plain; }), HasSubstr("got a mix"))
      << "the same call once more, outside of the scope";
}

TEST_F(DTensorErrors, TwoMeshes) {
  const auto other = DTensor::from_local(numbered({4, 3}), square_, {Shard(0), Replicate()});
  EXPECT_THAT(
      message_of([&] { rows() + other; }),
      AllOf(HasSubstr("aten::add: expected distributed tensors on one mesh, got DeviceMesh("),
            HasSubstr("to_local()")));
}

TEST_F(DTensorErrors, Memory) {
  const auto message = [](const at::Tensor& tensor) {
    return message_of<c10::Error>([&] { tensor.data_ptr<float>(); });
  };
  auto converted = torch::ones({8, 3});
  distribute_tensor_(converted, mesh_, {Shard(0)});
  const auto text = AllOf(HasSubstr("a DTensor has no memory of its own"), HasSubstr("to_local()"));
  EXPECT_THAT(message(converted), text);
  EXPECT_THAT(message(rows()), text);
  EXPECT_THAT(message(rows() + 1), text);
  const auto tensor = rows();
  EXPECT_THROW((tensor.accessor<float, 2>()), c10::Error);
  EXPECT_THROW(tensor.storage(), c10::Error);
  EXPECT_THAT(
      message_of<c10::Error>([&] {
        std::ostringstream out;
        out << static_cast<const at::Tensor&>(tensor);
      }),
      AllOf(text, HasSubstr("To print it, write std::cout << tessera::DTensor::of(tensor)")))
      << "printed as what it is not";
  EXPECT_THROW(tensor.item(), c10::Error) << "more than one element";
}

TEST_F(DTensorErrors, TargetsThatCantBeBroughtBack) {
  auto product = DTensor::from_local(numbered({2, 3}), mesh_, {Partial("product")});
  EXPECT_THAT(message_of<c10::Error>([&] { product.exp_(); }),
              AllOf(HasSubstr("aten::exp_: an operation in place leaves its target placed "
                              "[Partial(product)], and there is no way to bring the result there"),
                    HasSubstr("the form that returns a new tensor")));
  auto local = numbered({2, 3}).requires_grad_();
  const auto tensor =
      DTensor::from_local(local, mesh_, {}, {.grad_placements = Placements{Partial("product")}});
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { tensor.sum().backward(); }),
              HasSubstr("redistribute: there is no way from [Replicate()] to [Partial(product)]"));
}

TEST_F(DTensorErrors, PartialTargetsOfMaximaToBeDifferentiated) {
  const auto leaf = DTensor::from_local(numbered({2, 3}), mesh_, {Partial()}).requires_grad_();
  const auto index = DTensor::from_local(torch::zeros({2, 3}, torch::kLong), mesh_);
  const auto source = DTensor::from_local(numbered({2, 3}), mesh_);
  const auto write = [&] { (leaf * 1).scatter_reduce_(0, index, source, "amax"); };
  EXPECT_THAT(message_of<c10::NotImplementedError>(write),
              AllOf(HasSubstr("aten::scatter_reduce_: expected a target placed Shard or Replicate "
                              "where the derivative is wanted, got [Partial(sum)]"),
                    HasSubstr("redistribute it first")));
  const torch::NoGradGuard no_grad;
  write();
}

TEST_F(DTensorErrors, StepsInMemoryThatNobodyHas) {
  EXPECT_THAT(message_of<c10::NotImplementedError>([&] { rows().as_strided({2}, {1}, 1); }),
              AllOf(HasSubstr("aten::as_strided: expected a contiguous distributed tensor and no "
                              "storage_offset, got strides"),
                    HasSubstr("full_tensor()")));
}

TEST_F(DTensorErrors, ShapesThatRanksOutsideOfTheMeshCantTell) {
  const DeviceMesh others(torch::kCPU, {1, 2});
  const auto tensor = distribute_tensor(numbered({4, 2}), others, {Shard(0)});
  EXPECT_THAT(message_of<c10::Error>([&] { torch::nonzero(tensor); }),
              AllOf(HasSubstr("aten::nonzero: rank 0 is outside of DeviceMesh(cpu"),
                    HasSubstr("call it there alone")));
}

struct Refused {
  const char* name;
  void (*call)(at::Tensor& tensor);
};

/// Everybody who holds a distributed tensor relies on its shape.
constexpr Refused kRefused[] = {
    {"squeeze_", [](at::Tensor& x) { x.squeeze_(); }},
    {"unsqueeze_", [](at::Tensor& x) { x.unsqueeze_(0); }},
    {"t_", [](at::Tensor& x) { x.t_(); }},
    {"transpose_", [](at::Tensor& x) { x.transpose_(0, 1); }},
    {"swapaxes_", [](at::Tensor& x) { x.swapaxes_(0, 1); }},
    {"swapdims_", [](at::Tensor& x) { x.swapdims_(0, 1); }},
    {"as_strided_", [](at::Tensor& x) { x.as_strided_({2}, {1}); }},
    {"resize_", [](at::Tensor& x) { x.resize_({2, 2}); }},
    {"resize_as_", [](at::Tensor& x) { x.resize_as_(x.sum(0)); }},
    {"set_", [](at::Tensor& x) { x.set_(x.clone()); }},
    {"_resize_output_", [](at::Tensor& x) { at::_resize_output_(x, {2, 2}, x.device()); }},
};

TEST_F(DTensorErrors, AnotherShapeOrMemoryInPlace) {
  for (const auto& [name, call] : kRefused) {
    at::Tensor tensor = rows();
    EXPECT_THAT(message_of<c10::NotImplementedError>([&, call = call] { call(tensor); }),
                HasSubstr("can't be given another shape or memory in place"))
        << name;
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({8, 3})) << name;
  }
}

at::Tensor doubled(const at::Tensor& x) { return x * 2; }

TORCH_LIBRARY(tessera_dtensor_test, library) {
  library.def("doubled(Tensor x) -> Tensor");
  library.impl("doubled", c10::DispatchKey::CPU, TORCH_FN(doubled));
}

at::Tensor call_doubled(const at::Tensor& x) {
  static const auto kOperator = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("tessera_dtensor_test::doubled", "")
                                    .typed<at::Tensor(const at::Tensor&)>();
  return kOperator.call(x);
}

TEST(DTensorWithoutRuleOnThreads, IsGatheredOrAnError) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({5, 3});
    const auto tensor = placed(whole, mesh, {Shard(0)});
    {
      const StrictSharding strict;
      EXPECT_THAT(message_of<c10::NotImplementedError>([&] { call_doubled(tensor); }),
                  HasSubstr("tessera_dtensor_test::doubled: there is no sharding rule for this "
                            "operator and StrictSharding is on"));
      expect_equal(full_of(tensor + 1), whole + 1, "others go on");
    }
    const comm_debug scope;
    const auto result = DTensor::of(call_doubled(tensor));
    EXPECT_EQ(result.placements(), Placements{Replicate()});
    expect_equal(result.to_local(), whole * 2);
    EXPECT_EQ(scope.counts().at("all_gather").collectives, 1);
  });
}

at::Tensor tripled(const at::Tensor& x) { return x * 3; }

TORCH_LIBRARY_FRAGMENT(tessera_dtensor_test, library) {
  library.def("tripled(Tensor x) -> Tensor");
  library.impl("tripled", c10::DispatchKey::CPU, TORCH_FN(tripled));
}

TEST_F(DTensorErrors, OneWarningNamesAnOperatorWithoutRule) {
  const CaughtWarnings warnings;
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("tessera_dtensor_test::tripled", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  const auto tensor = DTensor::from_local(numbered({2, 3}), mesh_);
  for (int i = 0; i < 3; ++i) op.call(tensor);
  ASSERT_EQ(warnings.texts.size(), 1U);
  EXPECT_THAT(warnings.texts[0], HasSubstr("tessera_dtensor_test::tripled: no sharding rule"));
}

}  // namespace
}  // namespace tessera::testing
