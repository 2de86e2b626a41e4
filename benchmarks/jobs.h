#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace tessera::benchmarks {

/// What is trained: a model, equal on every rank, and its loss on this rank's batch.
/// peers/jobs.py has the same jobs for PyTorch.
struct Job {
  std::shared_ptr<torch::nn::Module> model;
  std::function<at::Tensor()> forward;                       // the model's output
  std::function<at::Tensor(const at::Tensor& output)> loss;  // of the output, a scalar
  c10::Device device = torch::kCPU;
  int64_t tokens = 0;  // of the batch; 0: it has none
};

/// On the CPU mlp, net2000, gpt, qwen; on CUDA mlp, gpt, gpt12x768, gpt2, qwen, in sizes that suit
/// it: qwen has Qwen2.5-0.5B's there.
std::vector<std::string> job_names(c10::DeviceType device);

/// Weights depend on the job alone, the batch also on `rank`. Reseeds the default generator.
Job make_job(const std::string& name, int rank, c10::Device device = torch::kCPU);

/// The gpt of any depth; its blocks are the submodules blocks.0, blocks.1, …. `has_memory`: false
/// leaves its parameters on the meta device.
Job make_gpt(int rank, int blocks, bool has_memory = true);

/// The gpt of any depth, with a batch that takes little time: what it takes to compile its step
/// does not depend on that.
Job make_brief_gpt(int blocks, c10::Device device);

/// Steps per timed block: long enough for the clock and for other processes' noise to even out.
int steps_per_block(const std::string& name, c10::DeviceType device);

}  // namespace tessera::benchmarks
