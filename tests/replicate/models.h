#pragma once

#include <tessera/comm.h>
#include <tessera/nn.h>

#include <gtest/gtest.h>

/// The models of the requirements, and a few that make life harder.
namespace tessera::testing {

/// Three Linear(2 -> 2) in a row.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    fc1 = replace("fc1");
    fc2 = replace("fc2");
    fc3 = replace("fc3");
  }
  nn::Linear replace(const std::string& name) { return register_module(name, nn::Linear(2, 2)); }
  at::Tensor forward(const at::Tensor& x) { return fc3(fc2(fc1(x))); }
  nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
};
TESSERA_MODULE(Net);

/// `inp @ kwarg` first, if there is one.
struct MyNetImpl : torch::nn::Module {
  MyNetImpl() : a(register_module("a", nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& inp, const std::optional<at::Tensor>& kwarg = {}) {
    return a(kwarg ? inp.matmul(*kwarg) : inp);
  }
  nn::Linear a;
};
TESSERA_MODULE(MyNet, "inp", "kwarg");

/// Uses `left` or `right`, as told, and never `spare`.
struct BranchesImpl : torch::nn::Module {
  explicit BranchesImpl(int64_t width = 6)
      : left(register_module("left", nn::Linear(width, width))),
        right(register_module("right", nn::Linear(width, width))),
        spare(register_module("spare", nn::Linear(width, width))) {}
  at::Tensor forward(const at::Tensor& x, bool goes_left) { return goes_left ? left(x) : right(x); }
  nn::Linear left, right, spare;
};
TESSERA_MODULE(Branches);

/// An Embedding with sparse gradients before a layer with dense ones.
struct WordsImpl : torch::nn::Module {
  WordsImpl()
      : words(register_module("words",
                              nn::Embedding(torch::nn::EmbeddingOptions(11, 3).sparse(true)))),
        out(register_module("out", nn::Linear(3, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return out(words(x)); }
  nn::Embedding words;
  nn::Linear out;
};
TESSERA_MODULE(Words);

/// Plain libtorch, nothing of ours.
struct PlainNetImpl : torch::nn::Module {
  explicit PlainNetImpl(int64_t width = 5)
      : up(register_module("up", torch::nn::Linear(width, 3 * width))),
        down(register_module("down", torch::nn::Linear(3 * width, width))) {}
  at::Tensor forward(const at::Tensor& x) { return down(up(x).tanh()); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(PlainNet);

/// Large and small parameters, so that gradients travel both ways.
struct WideImpl : torch::nn::Module {
  explicit WideImpl(int64_t in = 7, int64_t hidden = 200)
      : up(register_module("up", nn::Linear(in, hidden))),
        mid(register_module("mid", nn::Linear(hidden, hidden))),
        norm(register_module("norm", nn::LayerNorm(torch::nn::LayerNormOptions({hidden})))),
        down(register_module("down", nn::Linear(hidden, in))) {}
  at::Tensor forward(const at::Tensor& x) { return down(norm(at::gelu(mid(up(x).relu())))); }
  nn::Linear up, mid;
  nn::LayerNorm norm;
  nn::Linear down;
};
TESSERA_MODULE(Wide);

inline void expect_equal_on_all_ranks(const at::Tensor& tensor) {
  const auto all = all_gather(tensor.flatten(), 0).view({world_size(), -1});
  for (int other = 1; other < world_size(); ++other) EXPECT_TRUE(at::equal(all[other], all[0]));
}

}  // namespace tessera::testing
