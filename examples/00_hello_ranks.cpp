// Ranks that train one Linear layer together, averaging gradients by hand.
//
//   tessera run -n 2 -- 00_hello_ranks
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

int main() try {
  tessera::init();  // ranks from tessera run, torchrun, Slurm or MPI; started alone: a world of one
  const int rank = tessera::rank();
  const auto group = tessera::default_group();

  torch::manual_seed(1);  // the same start on every rank
  const auto truth = torch::randn({8, 1});
  torch::nn::Linear layer(8, 1);
  torch::optim::SGD optimizer(layer->parameters(), /*lr=*/0.1);

  torch::manual_seed(100 + rank);  // each rank sees its own data
  for (int step = 0; step <= 60; ++step) {
    const auto x = torch::randn({32, 8});
    const auto y = x.mm(truth) + 3;
    optimizer.zero_grad();
    const auto loss = torch::mse_loss(layer(x), y);
    loss.backward();

    std::vector<at::Tensor> gradients;
    for (const auto& parameter : layer->parameters()) gradients.push_back(parameter.grad());
    c10d::AllreduceCoalescedOptions average;
    average.reduceOp = tessera::ReduceOp::AVG;
    group->allreduce_coalesced(gradients, average)->wait();
    optimizer.step();

    const auto mean_loss = tessera::all_reduce(loss.detach(), tessera::ReduceOp::AVG);
    if (rank == 0 && step % 10 == 0) {
      std::cout << "step " << step << "  loss over " << tessera::world_size()
                << " ranks: " << mean_loss.item<float>() << std::endl;
    }
  }

  // Every rank holds the same weights, bit for bit.
  const auto weights = tessera::gather_bytes(
      {static_cast<const char*>(layer->weight.data_ptr()), layer->weight.nbytes()});
  for (const auto& other : weights) TORCH_CHECK(other == weights[0], "ranks have diverged");
  std::cout << "rank " << rank << " of " << tessera::world_size()
            << ": the weights agree on all ranks, bias " << layer->bias.item<float>()
            << " (should be near 3)" << std::endl;
  tessera::shutdown();
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
