// Activation checkpointing and saved tensors on a GPU: its random numbers, its autocast, its
// copies.
#include <tessera/autocast.h>

#include "checkpoint/outcome.h"
#include "compose/on_device.h"

namespace tessera::testing {
namespace {

class CheckpointOnDevices : public OnBackends {
 protected:
  void run(const RankBody& body) { OnBackends::run(1, body); }
};
INSTANTIATE_TEST_SUITE_P(OnCuda, CheckpointOnDevices, ::testing::ValuesIn(cuda_cases({"shm"}, {1})),
                         backend_name);

/// Outcomes of a block that `call` calls, and of its plain twin.
template <class F>
void expect_same_as_plain(const F& call, double dropout = 0.3) {
  auto [plain, other] = device_twins<Block>(3, 16, dropout);
  const auto x = drawn_on_device({6, 16}, 1);
  const auto expected =
      outcome_of(*plain, {x}, [&plain = plain](auto& leaves) { return plain(leaves[0]); });
  const auto actual =
      outcome_of(*other, {x}, [&, &other = other](auto& leaves) { return call(other, leaves[0]); });
  expect_same(actual, expected);
}

TEST_P(CheckpointOnDevices, ModulesWithDropoutTrainToTheSameBits) {
  run([] { expect_same_training<Block>({drawn_on_device({6, 16}, 1)}, 16, 0.3); });
}

TEST_P(CheckpointOnDevices, AnotherMaskIsDrawnWithoutThePreservedState) {
  run([] {
    auto [plain, checkpointed] = device_twins<Block>(3, 16, 0.5);
    checkpoint(checkpointed, {.preserve_rng_state = false});
    const auto x = drawn_on_device({6, 16}, 1);
    const auto outcome = [&x](Block& block) {
      return outcome_of(*block, {x}, [&](auto& leaves) { return block(leaves[0]); });
    };
    const auto actual = outcome(checkpointed), expected = outcome(plain);
    expect_bitwise_equal(actual.tensors[0].second, expected.tensors[0].second, "output");
    EXPECT_FALSE(tensors_bitwise_equal(actual.tensors[1].second, expected.tensors[1].second));
  });
}

TEST_P(CheckpointOnDevices, CallsInsideOfCallsGiveTheSameBits) {
  run([] {
    expect_same_as_plain([](Block& block, const at::Tensor& x) {
      return checkpoint_call(
          [block](const at::Tensor& y) mutable { return checkpoint_call(block, y); }, x);
    });
  });
}

TEST_P(CheckpointOnDevices, FunctionsThatDrawGiveTheSameGradients) {
  run([] {
    auto weight = drawn_on_device({4, 4}, 1).requires_grad_();
    const auto loss = [&](bool checkpoints) {
      torch::manual_seed(5);
      const auto body = [](const at::Tensor& w) { return torch::dropout(w, 0.5, true) * w; };
      const auto y = checkpoints ? checkpoint_call(body, weight) : body(weight);
      weight.mutable_grad() = at::Tensor();
      y.sum().backward();
      return weight.grad().clone();
    };
    expect_bitwise_equal(loss(true), loss(false), "gradient");
  });
}

TEST_P(CheckpointOnDevices, AutocastIsThatOfTheForward) {
  run([] {
    auto [plain, checkpointed] = device_twins<Block>(3, 16, 0.0);
    checkpoint(checkpointed);
    const auto x = drawn_on_device({6, 16}, 1);
    const auto outcome = [&x](Block& block) {
      return outcome_of(*block, {x}, [&](auto& leaves) {
        const Autocast autocast(run_device().type(), {.dtype = at::kBFloat16});
        return block(leaves[0]);
      });  // backward comes outside of it
    };
    expect_same(outcome(checkpointed), outcome(plain));
  });
}

TEST_P(CheckpointOnDevices, SequencesInSegmentsGiveTheSameBits) {
  run([] {
    const auto make = [] {
      return seeded(3,
                    [] { return nn::Sequential(Block(16, 0.2), Block(16, 0.2), Block(16, 0.2)); });
    };
    auto plain = on_device(make());
    auto segmented = on_device(make());
    const auto x = drawn_on_device({6, 16}, 1);
    const auto expected =
        outcome_of(*plain, {x}, [&](auto& leaves) { return plain->forward(leaves[0]); });
    const auto actual = outcome_of(*segmented, {x}, [&](auto& leaves) {
      return checkpoint_sequential(segmented, 2, leaves[0]);
    });
    expect_same(actual, expected);
  });
}

TEST_P(CheckpointOnDevices, LessMemoryIsKeptUntilBackward) {
  run([] {
    const auto kept = [](bool checkpoints) {
      auto block = on_device(seeded(3, [] { return Block(64, 0.1); }));
      if (checkpoints) checkpoint(block);
      int64_t bytes = 0;
      const saved_tensor_hooks count(
          [&](const at::Tensor& tensor) {
            bytes += static_cast<int64_t>(tensor.nbytes());
            return tensor;
          },
          [](const at::Tensor& tensor) { return tensor; });
      const auto y = block(drawn_on_device({32, 64}, 1).requires_grad_());
      y.sum().backward();
      return bytes;
    };
    EXPECT_LT(kept(true), kept(false) / 2);
  });
}

TEST_P(CheckpointOnDevices, SavedTensorsWaitOnTheHost) {
  run([] {
    for (const bool is_pinned : {false, true}) {
      expect_same_as_plain([is_pinned](Block& block, const at::Tensor& x) {
        const save_on_cpu offload(is_pinned);
        return block(x);
      });
      const auto x = drawn_on_device({3, 3}, 1).requires_grad_();
      at::Tensor y;
      {
        const save_on_cpu offload(is_pinned);
        y = x.exp();
      }
      const auto expected = y.detach().clone();
      y.sum().backward();
      expect_bitwise_equal(x.grad(), expected, "gradient");
    }
  });
}

TEST_P(CheckpointOnDevices, PinnedCopiesDoNotHoldTheHostUp) {
  run([] {
    auto block = on_device(seeded(3, [] { return Block(64); }));
    const auto x = drawn_on_device({32, 64}, 1);
    EXPECT_TRUE(returns_ahead_of_device([&] {
      const save_on_cpu offload(/*pin_memory=*/true);
      block(x).sum().backward();
      block->zero_grad();
    }));
  });
}

TEST_P(CheckpointOnDevices, RecomputationRunsOnTheStreamOfTheForward) {
  run([] {
    const auto side = side_stream();
    const auto main = current_stream();
    order_streams(main, side);
    auto [plain, checkpointed] = device_twins<Block>(3, 16, 0.3);
    checkpoint(checkpointed);
    const auto x = drawn_on_device({6, 16}, 1);
    const auto outcome = [&x](Block& block) {
      return outcome_of(*block, {x}, [&](auto& leaves) { return block(leaves[0]); });
    };
    const auto expected = outcome(plain);
    order_streams(main, side);
    Outcome actual;
    {
      const c10::StreamGuard guard(side);
      const BusyStream late;
      actual = outcome(checkpointed);
    }
    order_streams(side, main);
    expect_same(actual, expected);
  });
}

}  // namespace
}  // namespace tessera::testing
