#pragma once

#include <tessera/nn.h>

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

/// Trees of modules drawn by seed, with what makes composition hard: sizes that no number of ranks
/// divides, scalars, bare parameters next to modules, shared, frozen and unused ones, and modules
/// that run twice.
namespace tessera::testing {

using Random = std::mt19937_64;

/// From `low` to `high`, both included; the same in every standard library.
int64_t draw(Random& random, int64_t low, int64_t high);
bool one_in(Random& random, int64_t n);

enum class Kind {
  Layer,     // a Linear
  Mlp,       // two layers of another width, perhaps with a gain
  Tied,      // two layers of one weight
  Sequence,  // nn::Sequential
  Branch,    // a residual stack in an nn::ModuleList, perhaps with a parameter of its own
  Root,
};

struct Shape {
  Kind kind = Kind::Layer;
  int64_t hidden = 0;  // width inside an Mlp
  bool has_gain = false;
  bool has_bare = false;
  bool has_unused = false;  // a parameter of its own that forward does not read
  bool is_frozen = false;
  bool runs_twice = false;
  std::vector<Shape> parts;
};

struct TreeShape {
  int64_t width = 0;
  Shape root;
};

TreeShape draw_tree(Random& random);
/// "branch", "mlp 9 with gain, frozen", …
std::string describe(const Shape& shape);

/// A module of a tree: how it is called and what it has inside, in the order of its shape.
struct Part {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> call;
  std::function<void(nn::Sequential&)> push_to;
  std::vector<Part> parts;
};

/// In float64: Adam makes steps of the learning rate out of gradients that are but rounding errors,
/// and only there these are far below its epsilon.
Part build(const TreeShape& tree);

inline constexpr int64_t kTreeInput = 6;

/// What policies name.
struct AffineImpl : torch::nn::Module {
  explicit AffineImpl(const at::Tensor& shared_weight)
      : weight(register_parameter("weight", shared_weight)),
        bias(register_parameter("bias", torch::randn({shared_weight.size(0)}))) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};
TESSERA_MODULE(Affine);

struct MlpImpl : torch::nn::Module {
  MlpImpl(const Shape& shape, int64_t width);
  at::Tensor forward(const at::Tensor& x);
  nn::Linear up, down;
  at::Tensor gain, shift, unused;
};
TESSERA_MODULE(Mlp);

}  // namespace tessera::testing
