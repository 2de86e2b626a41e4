#pragma once

#include <tessera/dtensor.h>
#include <tessera/nn.h>
#include <tessera/optim.h>
#include <tessera/pipeline.h>

#include "compose/on_device.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <string>
#include <utility>
#include <vector>

/// Chains that tests cut, and one rank to compare with.
namespace tessera::testing {

inline const std::vector<PipelineSchedule> kSchedules{
    PipelineSchedule::GPipe, PipelineSchedule::OneFOneB, PipelineSchedule::Interleaved1F1B,
    PipelineSchedule::ZeroBubble, PipelineSchedule::ZBVZeroBubble};

/// Linear layers and what stands between them: 3 modules of parameters per 5.
inline nn::Sequential make_chain(at::ScalarType dtype = at::kDouble, int64_t repeat = 3) {
  return seeded(7, [&] {
    nn::Sequential net;
    for (int64_t i = 0; i < repeat; ++i) {
      net->push_back("up" + std::to_string(i), nn::Linear(6, 9));
      net->push_back("act" + std::to_string(i), nn::GELU());
      net->push_back("norm" + std::to_string(i), nn::LayerNorm(std::vector<int64_t>{9}));
      net->push_back("down" + std::to_string(i),
                     nn::Linear(torch::nn::LinearOptions(9, 6).bias(i % 2 == 0)));
      net->push_back("tanh" + std::to_string(i), nn::Tanh());
    }
    net->to(run_device(), dtype);
    return net;
  });
}

inline at::Tensor mse(const at::Tensor& output, const at::Tensor& target) {
  return torch::mse_loss(output, target);
}

inline at::Tensor drawn_rows(int64_t rows, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  return drawn_on_device({rows, 6}, seed).to(dtype);
}

constexpr Tolerance kExact{.rtol = 1e-12, .atol = 1e-13};

/// The same without what tensor parallel layers can't have between them.
inline nn::Sequential make_mlp(int64_t repeat = 3) {
  return seeded(8, [&] {
    nn::Sequential net;
    for (int64_t i = 0; i < repeat; ++i) {
      net->push_back("up" + std::to_string(i), nn::Linear(6, 8));
      net->push_back("act" + std::to_string(i), nn::GELU());
      net->push_back("down" + std::to_string(i), nn::Linear(8, 6));
    }
    net->to(run_device(), at::kDouble);
    return net;
  });
}

/// Whether this rank has values of the parameter, or a part of them.
inline bool is_here(const at::Tensor& tensor) {
  return !is_dtensor(tensor) || DTensor::of(tensor).mesh().coordinate();
}
inline at::Tensor whole(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor(tensor) ? DTensor::of(tensor).full_tensor() : tensor;
}

/// Values, or gradients, of what is here.
inline void expect_same_parameters(const nn::Sequential& net, const nn::Sequential& reference,
                                   const Tolerance& tolerance, bool of_gradients,
                                   const std::string& label) {
  const auto expected = reference->named_parameters();
  for (const auto& item : net->named_parameters()) {
    if (!is_here(item.value())) {
      EXPECT_FALSE(item.value().grad().defined()) << label << item.key();
      continue;
    }
    const auto& other = expected[item.key()];
    if (of_gradients && !other.grad().defined()) {
      EXPECT_FALSE(item.value().grad().defined()) << label << item.key();
      continue;
    }
    expect_equal(whole(of_gradients ? item.value().grad() : item.value().detach()),
                 of_gradients ? other.grad() : other.detach(), label + " " + item.key(), tolerance);
  }
}

/// A net in a pipeline, and one that trains on one rank. `batch` of the whole batch: which part
/// this rank's pipeline gets.
struct PipelineTwins {
  nn::Sequential reference, net;
  optim::AdamW reference_optimizer, optimizer;
  Tolerance tolerance = kExact;
  std::function<at::Tensor(const at::Tensor&)> batch = [](const at::Tensor& whole) {
    return whole;
  };

  PipelineTwins(nn::Sequential reference_, nn::Sequential net_)
      : reference(std::move(reference_)),
        net(std::move(net_)),
        reference_optimizer(reference->parameters(), {.lr = 1e-2, .fused = true}),
        optimizer(net->parameters(), {.lr = 1e-2, .fused = true}) {}

  /// Without a pipeline: the reference alone.
  void train(Pipeline* pipe, uint64_t first_step, uint64_t steps, int64_t rows,
             const std::string& label) {
    for (uint64_t step = first_step; step < first_step + steps; ++step) {
      const auto dtype = reference->parameters()[0].scalar_type();
      const auto x = drawn_rows(rows, 2 * step, dtype);
      const auto y = drawn_rows(rows, 2 * step + 1, dtype);
      reference_optimizer.zero_grad();
      mse(reference->forward(x), y).backward();
      if (pipe != nullptr) {
        optimizer.zero_grad();
        const auto own_x = batch(x);
        const auto loss = pipe->step(own_x, batch(y));
        if (own_x.size(0) == rows)
          expect_equal(loss, mse(reference->forward(x), y).detach(), label + " loss", tolerance);
        expect_same_parameters(net, reference, tolerance, /*of_gradients=*/true,
                               label + " gradient of");
        optimizer.step();
      }
      reference_optimizer.step();
    }
    if (pipe != nullptr)
      expect_same_parameters(net, reference, tolerance, /*of_gradients=*/false, label);
  }
};

/// Trains the net in the pipeline, and a reference on one rank.
inline void expect_trains_as_one_rank(
    const PipelineOptions& options, int64_t rows,
    const std::function<nn::Sequential()>& make = [] { return make_chain(); },
    const Tolerance& tolerance = kExact, const std::function<void(nn::Sequential&)>& prepare = {}) {
  PipelineTwins twins(make(), make());
  twins.tolerance = tolerance;
  auto pipe = pipeline(twins.net, options);
  for (auto stage : pipe.stages()) {
    if (prepare) prepare(stage);
  }
  twins.train(&pipe, 0, 3, rows, c10::str(options.schedule, " on rank ", rank()));
}

}  // namespace tessera::testing
