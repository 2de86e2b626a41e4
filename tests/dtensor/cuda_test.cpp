// Distributed tensors on a GPU: kernels that only GPUs have, and the families of operators whose
// kernels differ from the CPU's.
#include <tessera/optim.h>

#include "compose/on_device.h"
#include "dtensor/brute_force.h"
#include "dtensor/placed.h"

#include <ATen/Context.h>

namespace tessera::testing {
namespace {

class FamiliesOnDevices : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(OnCuda, FamiliesOnDevices,
                         ::testing::Values("attention", "convolution", "embedding", "losses",
                                           "matrix", "norms", "reductions", "softmax"),
                         [](const auto& info) { return info.param; });

TEST_P(FamiliesOnDevices, GiveWhatOneDeviceGives) {
  brute_force::try_family_on({.device = at::kCUDA, .backend = "shm", .ranks = 2}, GetParam(),
                             brute_force::Range::Common, /*share=*/0.02);
}

class DTensorOnDevices : public ::testing::TestWithParam<DeviceCase> {
 protected:
  static void run(const std::function<void(const DeviceMesh&)>& body) {
    on_mesh(GetParam(), {GetParam().ranks}, body);
  }
};
INSTANTIATE_TEST_SUITE_P(OnCuda, DTensorOnDevices, ::testing::ValuesIn(cuda_cases()), case_name);

at::Tensor leaf_of(const at::Tensor& whole) { return whole.detach().clone().requires_grad_(); }
DTensor leaf_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placement& placement) {
  auto leaf = placed(whole, mesh, {placement});
  leaf.requires_grad_();
  return leaf;
}

TEST_P(DTensorOnDevices, WholeTensorsComeFromTheFirstRankAndGoToAll) {
  run([](const DeviceMesh& mesh) {
    const auto own = drawn_on_device({5, 7}, static_cast<uint64_t>(rank()));
    const auto first = drawn_on_device({5, 7}, 0);
    for (const auto& placement : {Replicate(), Shard(0), Shard(1)}) {
      const auto tensor = distribute_tensor(own, mesh, {placement});
      EXPECT_EQ(tensor.device(), run_device());
      EXPECT_EQ(tensor.to_local().device(), run_device());
      expect_bitwise_equal(tensor.full_tensor(), first, c10::str(placement));
    }
  });
}

TEST_P(DTensorOnDevices, ProductsAndTheirGradientsEqualOneDevice) {
  run([](const DeviceMesh& mesh) {
    const auto a = drawn_on_device({6, 10}, 1);
    const auto b = drawn_on_device({10, 9}, 2);
    auto plain_a = leaf_of(a);
    auto plain_b = leaf_of(b);
    const auto expected = at::mm(plain_a, plain_b).tanh();
    expected.sum().backward();
    for (const auto& of_a : {Replicate(), Shard(0), Shard(1)}) {
      for (const auto& of_b : {Replicate(), Shard(0), Shard(1)}) {
        const auto label = c10::str(of_a, " x ", of_b);
        auto x = leaf_of(a, mesh, of_a);
        auto y = leaf_of(b, mesh, of_b);
        const auto product = at::mm(x, y).tanh();
        expect_equal(full_of(product), expected.detach(), label, Tolerance{1e-4, 1e-5});
        product.sum().backward();
        expect_equal(full_of(x.grad()), plain_a.grad(), label, Tolerance{1e-4, 1e-5});
        expect_equal(full_of(y.grad()), plain_b.grad(), label, Tolerance{1e-4, 1e-5});
      }
    }
  });
}

/// Attention with heads or samples sharded, against one device.
void expect_equal_attention(const DeviceMesh& mesh, at::ScalarType dtype, bool is_causal) {
  const auto drawn = [&](uint64_t seed) { return drawn_on_device({4, 4, 16, 64}, seed).to(dtype); };
  const auto attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return at::scaled_dot_product_attention(q, k, v, {}, 0, is_causal);
  };
  std::vector<at::Tensor> plain = {leaf_of(drawn(1)), leaf_of(drawn(2)), leaf_of(drawn(3))};
  const auto expected = attend(plain[0], plain[1], plain[2]);
  expected.to(at::kFloat).square().sum().backward();
  const Tolerance tolerance = dtype == at::kFloat ? Tolerance{1e-3, 1e-4} : Tolerance{2e-2, 2e-2};
  for (const auto& placement : {Shard(0), Shard(1), Replicate()}) {
    std::vector<DTensor> parts;
    for (const auto& whole : plain) parts.push_back(leaf_of(whole.detach(), mesh, placement));
    const auto output = attend(parts[0], parts[1], parts[2]);
    EXPECT_EQ(DTensor::of(output).placements(), Placements{placement});
    expect_equal(full_of(output), expected.detach(), c10::str(placement), tolerance);
    output.to(at::kFloat).square().sum().backward();
    for (size_t i = 0; i < parts.size(); ++i)
      expect_equal(full_of(parts[i].grad()), plain[i].grad(), c10::str(placement, " of ", i),
                   tolerance);
  }
}

TEST_P(DTensorOnDevices, AttentionByEveryKernelKeepsItsShards) {
  run([](const DeviceMesh& mesh) {
    auto& context = at::globalContext();
    const auto only = [&](bool flash, bool efficient, bool cudnn) {
      context.setSDPUseFlash(flash);
      context.setSDPUseMemEfficient(efficient);
      context.setSDPUseCuDNN(cudnn);
    };
    for (const bool is_causal : {false, true}) {
      only(true, false, false);
      expect_equal_attention(mesh, at::kBFloat16, is_causal);
      only(false, true, false);
      expect_equal_attention(mesh, at::kFloat, is_causal);
      only(false, false, true);
      expect_equal_attention(mesh, at::kBFloat16, is_causal);
    }
    only(true, true, true);
  });
}

TEST_P(DTensorOnDevices, DropoutAndItsGradientAreThoseOfOneDevice) {
  run([](const DeviceMesh& mesh) {
    const auto whole = drawn_on_device({12, 9}, 1);
    auto plain = leaf_of(whole);
    torch::manual_seed(3);
    const auto expected = torch::dropout(plain, 0.4, true);
    expected.square().sum().backward();
    for (const auto& placement : {Replicate(), Shard(0), Shard(1)}) {
      auto part = leaf_of(whole, mesh, placement);
      torch::manual_seed(3);
      const auto dropped = torch::dropout(part, 0.4, true);
      expect_bitwise_equal(full_of(dropped), expected.detach(), c10::str(placement));
      dropped.square().sum().backward();
      expect_equal(full_of(part.grad()), plain.grad(), c10::str(placement));
    }
  });
}

TEST_P(DTensorOnDevices, DropoutOfPartsDrawnAfterOthersIsThatOfOneDevice) {
  run([](const DeviceMesh& mesh) {
    const auto draw = [&](const Placements& to) {
      torch::manual_seed(9);
      const auto first = dtensor::rand({3, 5}, mesh, to).full_tensor();
      const auto second = dtensor::randn({6, 2}, mesh, to).full_tensor();
      return at::cat({first.flatten(), second.flatten()});
    };
    torch::manual_seed(9);
    const auto first = torch::rand({3, 5}, run_device());
    const auto expected = at::cat({first.flatten(), torch::randn({6, 2}, run_device()).flatten()});
    for (const auto& placement : {Replicate(), Shard(0), Shard(1)})
      expect_bitwise_equal(draw({placement}), expected, c10::str(placement));
  });
}

TEST_P(DTensorOnDevices, NormsAndTheirGradientsEqualOneDevice) {
  run([](const DeviceMesh& mesh) {
    const auto whole = drawn_on_device({8, 12}, 1);
    const auto scale = drawn_on_device({12}, 2);
    for (const bool is_rms : {false, true}) {
      const auto apply = [&](const at::Tensor& x, const at::Tensor& weight) {
        return is_rms ? at::rms_norm(x, {12}, weight) : at::layer_norm(x, {12}, weight);
      };
      auto plain = leaf_of(whole);
      auto plain_scale = leaf_of(scale);
      const auto expected = apply(plain, plain_scale);
      expected.square().sum().backward();
      for (const auto& placement : {Replicate(), Shard(0), Shard(1)}) {
        const auto label = c10::str(is_rms ? "rms " : "layer ", placement);
        auto x = leaf_of(whole, mesh, placement);
        auto weight = leaf_of(scale, mesh, Replicate());
        const auto y = apply(x, weight);
        expect_equal(full_of(y), expected.detach(), label, Tolerance{1e-4, 1e-5});
        y.square().sum().backward();
        expect_equal(full_of(x.grad()), plain.grad(), label, Tolerance{1e-3, 1e-4});
        expect_equal(full_of(weight.grad()), plain_scale.grad(), label, Tolerance{1e-3, 1e-4});
      }
    }
  });
}

TEST_P(DTensorOnDevices, FusedOptimizersStepAsOnOneDevice) {
  run([](const DeviceMesh& mesh) {
    for (const bool fused : {false, true}) {
      const auto whole = drawn_on_device({5, 7}, 1);
      auto plain = leaf_of(whole);
      auto sharded = leaf_of(whole, mesh, Shard(0));
      optim::AdamW expected({plain}, {.lr = 1e-2, .foreach = !fused, .fused = fused});
      optim::AdamW optimizer({sharded}, {.lr = 1e-2, .foreach = !fused, .fused = fused});
      for (uint64_t step = 0; step < 3; ++step) {
        const auto gradient = drawn_on_device({5, 7}, 20 + step);
        plain.mutable_grad() = gradient;
        sharded.mutable_grad() = placed(gradient, mesh, {Shard(0)});
        expected.step();
        optimizer.step();
      }
      expect_equal(full_of(sharded), plain.detach(), fused ? "fused" : "foreach");
    }
  });
}

TEST_P(DTensorOnDevices, AnOverflowOfOneRankIsSkippedByAll) {
  run([](const DeviceMesh& mesh) {
    auto sharded = leaf_of(drawn_on_device({8, 3}, 1), mesh, Shard(0));
    const auto before = full_of(sharded);
    optim::AdamW optimizer({sharded}, {.lr = 1e-2, .fused = true});
    optim::GradScaler scaler({.device = run_device().type(), .init_scale = 8});
    for (const bool overflows : {true, false}) {
      auto gradient = at::ones({8, 3}, run_device());
      if (overflows) gradient[7][0] = INFINITY;  // held by the last rank
      scaler.scale(at::ones({}, run_device()));
      sharded.mutable_grad() = placed(gradient, mesh, {Shard(0)});
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(at::equal(full_of(sharded), before), overflows);
    }
    EXPECT_EQ(scaler.get_scale(), 4);
  });
}

TEST_P(DTensorOnDevices, ReductionsOverShardsStayOnTheDevice) {
  run([](const DeviceMesh& mesh) {
    const auto whole = drawn_on_device({7, 9}, 1);
    for (const auto& placement : {Shard(0), Shard(1), Partial()}) {
      const auto tensor = placed(whole, mesh, {placement});
      expect_equal(full_of(tensor.sum()), whole.sum(), c10::str(placement), Tolerance{1e-4, 1e-4});
      expect_equal(full_of(tensor.norm()), whole.norm(), c10::str(placement),
                   Tolerance{1e-4, 1e-4});
      const auto largest = std::get<0>(tensor.max(1));
      EXPECT_EQ(largest.device(), run_device());
      expect_equal(full_of(largest), std::get<0>(whole.max(1)), c10::str(placement),
                   Tolerance{1e-4, 1e-4});
    }
  });
}

class DTensorMeshOnDevices : public OnBackends {};
INSTANTIATE_TEST_SUITE_P(OnCuda, DTensorMeshOnDevices,
                         ::testing::ValuesIn(cuda_cases({"nccl", "shm"}, {4})), backend_name);

TEST_P(DTensorMeshOnDevices, ProductsOnTwoDimensionsEqualOneDevice) {
  run(4, [] {
    const auto mesh = init_device_mesh(run_device().type(), {2, 2}, {"dp", "tp"});
    const auto x = drawn_on_device({6, 10}, 1);
    const auto weight = drawn_on_device({10, 8}, 2);
    auto plain = leaf_of(weight);
    const auto expected = at::mm(x, plain);
    expected.square().sum().backward();
    auto part = placed(weight, mesh, {Replicate(), Shard(1)});
    part.requires_grad_();
    const auto product = at::mm(placed(x, mesh, {Shard(0), Replicate()}), part);
    EXPECT_EQ(DTensor::of(product).placements(), (Placements{Shard(0), Shard(1)}));
    expect_equal(full_of(product), expected.detach(), "product", Tolerance{1e-4, 1e-5});
    product.square().sum().backward();
    expect_equal(full_of(part.grad()), plain.grad(), "gradient", Tolerance{1e-4, 1e-4});
  });
}

}  // namespace
}  // namespace tessera::testing
