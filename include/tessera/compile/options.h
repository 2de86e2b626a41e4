#pragma once

#include <tessera/compile/data_parallel.h>
#include <tessera/compile/override.h>
#include <tessera/compile/pass.h>
#include <tessera/nn/module_ref.h>

#include <torch/optim/optimizer.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

struct CompileOptions {
  /// Makes a step that was written for one rank a step of many, such as DataParallel("replicate").
  /// The parameters of its module and the state of its optimizer become DTensors with the first
  /// call, before which the optimizer must have made its state: by one step without this. Every
  /// rank makes the same calls; collective.
  AnyParallelMode parallel_mode = {};
  /// A module or an optimizer that the function uses without being given it: one that a lambda
  /// captures. Names in the program are theirs; training mode of libtorch's own modules, which
  /// can't be hooked, and which tensors are the module's parameters, are watched. Ones that are
  /// gone by a later call are forgotten, but for an optimizer of torch::optim, which has to live as
  /// long as calls are made.
  std::optional<nn::ModuleRef> module = std::nullopt;
  std::optional<std::reference_wrapper<torch::optim::Optimizer>> optimizer = std::nullopt;
  /// What can't be compiled is an error. Otherwise it runs as it is, with one warning.
  bool fullgraph = false;
  /// False: no gradients of the parameters are left after a call, as if it ended with zero_grad();
  /// the program need not keep them.
  bool keep_grads = true;
  /// torch::kHalf or torch::kBFloat16: gradients are averaged in that, as by replicate's
  /// fp16_compress_hook and bf16_compress_hook: cast, divided, reduced, cast back.
  std::optional<at::ScalarType> compress_gradients = std::nullopt;
  /// "codegen": kernels of our own, compiled on this machine. "interpret": ATen's alone.
  std::string backend = "codegen";
  /// Stand-ins for modules that can't be recorded.
  std::vector<std::shared_ptr<Override>> module_override = {};
  /// Rewrites the captured graph, once for each program, before any pass. Inputs and outputs stay
  /// as they are.
  std::function<void(Graph&)> gm_transformation = {};
  /// Run after those of ours that work on operators, in this order, and before fuse_pointwise and
  /// reuse_memory.
  std::vector<Pass> passes = {};
  /// Names of passes that are left out.
  std::vector<std::string> disabled_passes = {};
  /// The graph after every pass goes to a file here. Empty: none.
  std::string dump_folder = {};
};

}  // namespace tessera
