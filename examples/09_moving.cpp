// A libtorch program that has moved to Tessera: weights that Python saved, an optimizer of
// torch::optim's that goes on in tessera::optim, outputs that are a struct:
//   tessera run -n 2 -- 09_moving [model.pt]
#include <tessera/tessera.h>

#include <torch/torch.h>

#include <iostream>

struct Output {  // what forward returns
  torch::Tensor logits, features;
};
void tessera_tensors(Output& output, auto&& visit) { visit(output.logits, output.features); }

struct NetImpl : torch::nn::Module {
  Output forward(const torch::Tensor& x) {
    const auto features = torch::tanh(body(x));
    return {head(features), features};
  }
  tessera::nn::Linear body{register_module("body", tessera::nn::Linear(8, 32))};
  tessera::nn::Linear head{register_module("head", tessera::nn::Linear(32, 4))};
};
TESSERA_MODULE(Net);  // instead of TORCH_MODULE(Net)

float train_step(Net& net, torch::optim::Optimizer& optimizer) {
  const auto x = torch::randn({16, 8});
  optimizer.zero_grad();
  const auto [logits, features] = net(x);
  const auto loss = torch::nn::functional::cross_entropy(logits, x.narrow(1, 0, 4).argmax(1)) +
                    1e-3 * features.square().mean();
  loss.backward();
  optimizer.step();
  return loss.item<float>();
}

int main(int argc, char** argv) try {
  tessera::init();
  torch::manual_seed(1);
  Net before;  // as the program was: plain libtorch on one process
  if (argc > 1) tessera::import_torch(argv[1], before);  // torch.save(net.state_dict(), "model.pt")
  torch::optim::AdamW stock(before->parameters(), torch::optim::AdamWOptions(3e-3));
  for (int step = 0; step < 20; ++step) train_step(before, stock);

  Net net;
  tessera::fully_shard(net);
  tessera::optim::AdamW optimizer(net->parameters(), {.fused = true});
  tessera::load_state_dict(net, tessera::state_dict(before));
  tessera::load_optimizer_state_dict(net, optimizer, tessera::optimizer_state_dict(before, stock));

  float loss = 0;
  for (int step = 0; step < 200; ++step) loss = train_step(net, optimizer);
  const auto weight = tessera::DTensor::of(net->head->weight.detach());
  std::cout << "rank " << tessera::rank() << " has rows " << weight.to_local().sizes() << " of "
            << net->head->weight.sizes() << ", loss " << loss << std::endl;
  std::cout << "whole: " << weight.full_tensor().sizes() << std::endl;  // every rank calls it

  tessera::load_state_dict(before, tessera::state_dict(net));  // and back
  tessera::load_optimizer_state_dict(before, stock, tessera::optimizer_state_dict(net, optimizer));
  const auto lr = static_cast<torch::optim::AdamWOptions&>(stock.param_groups()[0].options()).lr();
  if (tessera::rank() == 0) std::cout << "back in torch::optim with lr " << lr << std::endl;
  tessera::shutdown();
  return 0;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
}
