// A simulation that MPI runs trains a net on its ranks, with its communicator: one MPI_Allreduce
// for each parameter, as MOOSE's LibtorchArtificialNeuralNetTrainer does
// (github.com/idaholab/moose/issues/19571), or one line. Measures both:
//   mpirun -n 2 15_mpi
#include <tessera/mpi.h>
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <iostream>

struct Training {  // of a surrogate in double precision, as simulations compute
  Training(int64_t width, bool in_one_line)
      : net(torch::nn::Linear(8, width), torch::nn::Tanh(), torch::nn::Linear(width, width),
            torch::nn::Tanh(), torch::nn::Linear(width, width), torch::nn::Tanh(),
            torch::nn::Linear(width, 1)),
        is_replicated(in_one_line) {
    net->to(torch::kDouble);
    if (in_one_line) tessera::replicate(net);  // averages all gradients during backward
  }

  void run(MPI_Comm comm, int steps) {
    MPI_Barrier(comm);
    const auto start = MPI_Wtime();
    for (int step = 0; step < steps; ++step) {
      const auto x = torch::randn({16, 8}, torch::kDouble);  // what this rank has simulated
      optimizer.zero_grad();
      torch::mse_loss(net->forward(x), x.square().sum(1, /*keepdim=*/true)).backward();
      for (const auto& parameter : net->parameters()) {
        if (is_replicated) break;
        auto sum = parameter.grad();
        MPI_Allreduce(MPI_IN_PLACE, sum.data_ptr(), sum.numel(), MPI_DOUBLE, MPI_SUM, comm);
        sum /= tessera::world_size();
      }
      optimizer.step();
    }
    milliseconds = std::min(milliseconds, 1e3 * (MPI_Wtime() - start) / steps);
  }

  torch::nn::Sequential net;
  bool is_replicated;
  torch::optim::Adam optimizer{net->parameters(), 1e-3};
  double milliseconds = 1e9;  // per step, in the fastest run
};

void compare(MPI_Comm comm, int64_t width, int steps) {
  torch::manual_seed(1);  // both begin with the same values
  Training before(width, /*in_one_line=*/false);
  torch::manual_seed(1);
  Training after(width, /*in_one_line=*/true);
  for (int round = 0; round < 7; ++round) {
    for (auto* training : {&before, &after}) {  // in turn, with the same samples
      torch::manual_seed(100 * round + tessera::rank());
      training->run(comm, steps);
    }
  }
  for (size_t i = 0; i < after.net->parameters().size(); ++i)
    TORCH_CHECK(at::allclose(after.net->parameters()[i], before.net->parameters()[i], 1e-4, 1e-6),
                "expected both ways to train alike");
  if (tessera::rank() != 0) return;
  std::printf("width %4ld: %.2f ms per step with MPI_Allreduce, %.2f with replicate: ratio %.2f\n",
              width, before.milliseconds, after.milliseconds,
              before.milliseconds / after.milliseconds);
}

int main(int argc, char** argv) try {
  MPI_Init(&argc, &argv);
  at::set_num_threads(1);
  tessera::mpi::init(MPI_COMM_WORLD);  // a part as group: tessera::mpi::new_group(part)
  compare(MPI_COMM_WORLD, /*width=*/32, /*steps=*/100);
  compare(MPI_COMM_WORLD, /*width=*/1024, /*steps=*/3);
  tessera::shutdown();
  MPI_Finalize();
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  MPI_Abort(MPI_COMM_WORLD, 1);
}
