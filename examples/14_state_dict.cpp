// A state dict that Python has saved, and back; and one net's values into another's. What
// github.com/pytorch/pytorch/issues/36577 asks for:
//   torch.save(model.state_dict(), "model.pt")                       # Python
//   14_state_dict model.pt model.safetensors
//   model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
#include <tessera/serialize.h>

#include <torch/torch.h>

#include <iostream>
#include <regex>

/// nn.ModuleDict({"features": nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
/// nn.ReLU()), "head": nn.Linear(8, 4)}) in Python; here without the inner Sequential.
struct PolicyImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return head(features->forward(x).mean({2, 3})); }
  torch::nn::Sequential features{register_module(
      "features", torch::nn::Sequential(torch::nn::Conv2d(3, 8, 3), torch::nn::BatchNorm2d(8),
                                        torch::nn::ReLU()))};
  torch::nn::Linear head{register_module("head", torch::nn::Linear(8, 4))};
};
TORCH_MODULE(Policy);

/// The same tensors by other names: what `pattern` finds is replaced.
tessera::StateDict renamed(const tessera::StateDict& dict, const std::string& pattern,
                           const std::string& replacement) {
  tessera::StateDict result;
  for (const auto& [name, tensor] : dict)
    result.insert(std::regex_replace(name, std::regex(pattern), replacement), tensor);
  return result;
}

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 3, "expected two files: 14_state_dict model.pt model.safetensors");
  Policy policy;
  const auto saved = tessera::read_torch(argv[1]);  // an OrderedDict, as it was saved
  for (const auto& [name, tensor] : saved) std::cout << name << ": " << tensor.sizes() << std::endl;
  const auto differing = tessera::load_state_dict(policy, saved, {.strict = false});
  std::cout << differing.unexpected.size() << " names of Python's are not ours" << std::endl;
  // Nothing is left out when it is strict: import_torch(argv[1], policy), where names agree.
  tessera::load_state_dict(policy, renamed(saved, "^features\\.0\\.", "features."));

  Policy target;
  tessera::load_state_dict(target, tessera::state_dict(policy));  // buffers, too
  policy->eval();
  target->eval();
  const auto x = torch::ones({2, 3, 6, 6});
  TORCH_CHECK(target(x).equal(policy(x)), "expected the same outputs of the same values");

  torch::optim::SGD optimizer(policy->parameters(), /*lr=*/0.1);
  for (int step = 0; step < 10; ++step) {  // training goes on, here and then in Python again
    optimizer.zero_grad();
    torch::mse_loss(policy(x), torch::ones({2, 4})).backward();
    optimizer.step();
  }
  tessera::write_safetensors(argv[2],
                             renamed(tessera::state_dict(policy), "^features\\.", "features.0."));
  std::cout << "sum of outputs " << policy(x).sum().item<float>() << std::endl;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
}
