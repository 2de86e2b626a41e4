// Tensor parallel, checkpointed, fully sharded, compiled and saved: a net learns sums modulo 31.
// Started again, on as many ranks as you like, it goes on from what it has saved:
//   tessera run -n 4 -- 08_everything
//   tessera run -n 2 -- 08_everything
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

namespace nn = tessera::nn;  // every torch::nn module, hookable
constexpr int64_t kNumbers = 31, kWidth = 64, kBatch = 128;

struct BlockImpl : torch::nn::Module {  // plain libtorch
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(x))); }
  nn::Linear up{register_module("up", nn::Linear(kWidth, 4 * kWidth))};
  nn::Linear down{register_module("down", nn::Linear(4 * kWidth, kWidth))};
};
TESSERA_MODULE(Block);  // instead of TORCH_MODULE(Block): calls can be hooked

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {   // [batch, 2]
    return head(blocks->forward(words(x).sum(1)));  // [batch, numbers]
  }
  nn::Embedding words{register_module("words", nn::Embedding(kNumbers, kWidth))};
  nn::Sequential blocks{register_module("blocks", nn::Sequential(Block(), Block(), Block()))};
  nn::Linear head{register_module("head", nn::Linear(kWidth, kNumbers))};
};
TESSERA_MODULE(Net);

int main() try {
  tessera::init();  // ranks from tessera run, torchrun, Slurm, MPI
  const torch::Device device(torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  const auto mesh =
      tessera::init_device_mesh(device.type(), {tessera::world_size() / 2, 2}, {"dp", "tp"});
  torch::manual_seed(1);
  Net net;
  net->to(device);
  tessera::parallelize_module(
      net, mesh["tp"],
      {{"blocks.*.up", tessera::ColwiseParallel()}, {"blocks.*.down", tessera::RowwiseParallel()}});
  for (const auto& block : net->blocks->children()) {
    tessera::checkpoint(block);
    tessera::fully_shard(block, {.mesh = mesh["dp"]});
  }
  tessera::fully_shard(net, {.mesh = mesh["dp"]});
  tessera::optim::AdamW optimizer(net->parameters(), {.lr = 3e-3, .fused = true});
  const auto last = tessera::latest_checkpoint("checkpoints");
  if (last) tessera::load(*last, net, optimizer);  // saved on any number of ranks

  auto step = tessera::compile(  // optional: the same code runs eagerly
      [&](const torch::Tensor& x, const torch::Tensor& y) {
        optimizer.zero_grad();
        const auto loss = torch::nn::functional::cross_entropy(net(x), y);
        loss.backward();
        optimizer.step();
        return loss;
      },
      {.module = net, .optimizer = optimizer});

  torch::manual_seed(mesh["dp"].local_rank());  // ranks along dp have different batches
  for (int i = 1; i <= 200; ++i) {
    const auto x = torch::randint(kNumbers, {kBatch / mesh["dp"].size(), 2},
                                  torch::dtype(torch::kLong).device(device));
    const auto loss = step(x, x.sum(1) % kNumbers);
    const auto mean = tessera::all_reduce(loss.detach(), tessera::ReduceOp::AVG).item<float>();
    if (tessera::rank() == 0 && (i == 1 || i % 50 == 0))
      std::cout << "step " << i << "  loss " << mean << std::endl;
  }
  tessera::save("checkpoints/step-200", net, optimizer);
  if (tessera::rank() == 0)
    std::cout << tessera::explain(step) << (last ? "went on from " + *last : "began") << ", saved"
              << std::endl;
  tessera::shutdown();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
