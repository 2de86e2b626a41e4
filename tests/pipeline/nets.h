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

/// Whether this rank has the parameter's values.
inline bool is_here(const at::Tensor& tensor) { return !is_dtensor(tensor); }

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
    expect_equal(of_gradients ? item.value().grad() : item.value().detach(),
                 of_gradients ? other.grad() : other.detach(), label + " " + item.key(), tolerance);
  }
}

/// Trains the net in the pipeline, and a reference on one rank.
inline void expect_trains_as_one_rank(const PipelineOptions& options, int64_t rows,
                                      at::ScalarType dtype = at::kDouble,
                                      const Tolerance& tolerance = kExact, int64_t repeat = 3) {
  const auto label = c10::str(options.schedule, " on rank ", rank());
  auto reference = make_chain(dtype, repeat);
  auto net = make_chain(dtype, repeat);
  optim::AdamW optimizer(net->parameters(), {.lr = 1e-2});
  optim::AdamW reference_optimizer(reference->parameters(), {.lr = 1e-2});
  auto pipe = pipeline(net, options);
  for (uint64_t step = 0; step < 3; ++step) {
    const auto x = drawn_rows(rows, 2 * step, dtype);
    const auto y = drawn_rows(rows, 2 * step + 1, dtype);
    const auto loss = options.loss_fn(reference->forward(x), y);
    loss.backward();
    expect_equal(pipe.step(x, y), loss.detach(), label + " loss", tolerance);
    expect_same_parameters(net, reference, tolerance, /*of_gradients=*/true, label + " gradient of");
    optimizer.step();
    reference_optimizer.step();
    optimizer.zero_grad();
    reference_optimizer.zero_grad();
  }
  expect_same_parameters(net, reference, tolerance, /*of_gradients=*/false, label);
}

}  // namespace tessera::testing
