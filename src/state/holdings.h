#pragma once

#include "state/files/boxes.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <string>
#include <vector>

/// What this rank holds of everything that is saved.
///
/// Note [copies]. What several ranks hold is written by one of them. Copies of parameters and of
/// their optimizer's state are equal, so any rank may write any of them. Buffers are not: each rank
/// of a replicated or fully sharded module has running statistics of its own batches. They come
/// from the first rank that holds them, all from the same one, lest a mean of one rank meets the
/// variance of another.
namespace tessera::state {

/// A box of a whole tensor, in the order of the model that is not parallel.
struct HeldBox {
  Box box;
  int64_t row = 0;  // of the local tensor at which it begins; it has all of the other dimensions
};

struct Holding {
  std::string name;
  at::Tensor tensor;           // the module's or the optimizer's, itself
  at::Tensor local;            // this rank's part: plain, sharing memory
  std::vector<int64_t> shape;  // of the whole
  std::vector<HeldBox>
      pieces;               // what the local tensor is made of, in its order; empty ones left out
  bool may_differ = false;  // between ranks that hold the same piece: a buffer, see Note [copies]
};

/// Whether this rank has nothing of a tensor that others have, such as a parameter of their stage
/// of a pipeline.
bool is_elsewhere(const at::Tensor& tensor);

/// `parameter`: the tensor itself, or the parameter whose state it is and as which it is placed.
Holding hold(const std::string& function, std::string name, const at::Tensor& tensor,
             const at::Tensor& parameter);

/// Pieces of the whole tensor as full_tensor() gives it: one, unless its rows are packed.
std::vector<HeldBox> whole_pieces(const at::Tensor& parameter);

struct Holdings {
  std::vector<Holding> tensors;                // each tensor once
  std::map<std::string, std::string> aliases;  // further names -> the name it is held under
};

/// Of a module. Throws if a fully sharded unit's parameters are whole, or a name is reserved; and
/// if a function that was applied to the module has its values as none to be saved now.
Holdings hold_module(const std::string& function, const torch::nn::Module& module);
/// The same whatever was applied: for whole models, of which that is left out.
Holdings hold_values(const std::string& function, const torch::nn::Module& module);
/// Of the state of an optimizer of the module's parameters.
Holdings hold_optimizer(const std::string& function, const torch::nn::Module& module,
                        const torch::optim::Optimizer& optimizer);

/// Names under which state and extras are saved: "optimizer/<parameter>/<field>", "extra/<name>".
inline constexpr const char* kOptimizerPrefix = "optimizer/";
inline constexpr const char* kExtraPrefix = "extra/";
std::string state_name(const std::string& parameter, const std::string& field);

}  // namespace tessera::state
