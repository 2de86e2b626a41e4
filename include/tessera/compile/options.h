#pragma once

#include <tessera/compile/data_parallel.h>
#include <tessera/compile/override.h>
#include <tessera/compile/pass.h>
#include <tessera/nn/module_ref.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>
#include <torch/optim/optimizer.h>

#include <concepts>
#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// A variable of which a compiled step depends, by its address: `&beta`, or `{&beta, "beta"}` to
/// name it in messages. It must live as long as calls are made. A tensor is compared as which one
/// it is, not by its values.
class Watched {
 public:
  template <class T>
  Watched(const T* variable, std::string name = {})  // NOLINT(google-explicit-constructor)
      : bytes_(std::as_bytes(std::span<const T>(variable, 1))),
        name_(std::move(name)),
        type_(c10::demangle_type<T>()) {
    static_assert(
        std::is_trivially_copyable_v<T> || std::is_same_v<T, at::Tensor>,
        "tessera::compile: expected numbers, flags, enums, structs of these, or tensors "
        "in CompileOptions::watch: of a type that owns memory a change would not be seen");
    if constexpr (std::is_arithmetic_v<T>) {
      show_ = [](const std::byte* bytes) {
        T value;
        std::memcpy(&value, bytes, sizeof(T));
        return std::to_string(value);
      };
    }
  }

  std::span<const std::byte> bytes() const { return bytes_; }
  /// For messages. `number`: its place in the list.
  std::string name(size_t number) const {
    const auto which = name_.empty() ? std::to_string(number) : "'" + name_ + "'";
    return "watched variable " + which + " (" + type_ + ")";
  }
  /// The value that these bytes are, if it is a number; empty if not.
  std::string show(const std::byte* bytes) const { return show_ == nullptr ? "" : show_(bytes); }

 private:
  std::span<const std::byte> bytes_;
  std::string name_, type_;
  std::string (*show_)(const std::byte*) = nullptr;
};

/// What runs the operators of a program.
enum class CompileBackend {
  Codegen,    // kernels of our own, compiled on this machine
  Interpret,  // ATen's alone
};

/// A CompileBackend, or its name: "codegen" or "interpret". Another one is a ValueError.
class CompileBackendOption {
 public:
  CompileBackendOption(CompileBackend backend) : backend_(backend) {}  // NOLINT: all convert
  CompileBackendOption(const std::string& name);                       // NOLINT
  CompileBackendOption(const char* name) : CompileBackendOption(std::string(name)) {}  // NOLINT
  operator CompileBackend() const { return backend_; }                                 // NOLINT

 private:
  CompileBackend backend_;
};

struct CompileOptions {
  /// Makes a step that was written for one rank a step of many, such as DataParallel().
  /// The parameters of its module and the state of its optimizer become DTensors with the first
  /// call, before which the optimizer must have made its state: by one step without this. Every
  /// rank makes the same calls; collective.
  AnyParallelMode parallel_mode = {};
  /// A module or an optimizer that the function uses without being given it: one that a lambda
  /// captures. Names in the program are theirs. What is watched of a module that is called and can
  /// be hooked is watched of this one and of all below it, hookable or not, and so is which tensors
  /// are its parameters. Ones that are
  /// gone by a later call are forgotten, but for an optimizer of torch::optim, which has to live as
  /// long as calls are made.
  std::optional<nn::ModuleRef> module = std::nullopt;
  std::optional<std::reference_wrapper<torch::optim::Optimizer>> optimizer = std::nullopt;
  /// Variables that the function reads without being given them: `.watch = {&beta, &flag}`. A
  /// change of one is recorded anew. What a lambda captures by reference can't be seen otherwise.
  std::vector<Watched> watch = {};
  /// What can't be compiled is an error. Otherwise it runs eagerly, with one warning.
  bool fullgraph = false;
  /// How many programs are kept, one for each kind of call; of more, the least recently used goes.
  size_t max_programs = 8;
  /// False: no gradients of the parameters are left after a call, as if it ended with zero_grad();
  /// the program need not keep them.
  bool keep_grads = true;
  /// Bytes that the values which a program makes may take at a time: activations, gradients,
  /// temporaries; neither what it is given nor what operators allocate for themselves. Where it
  /// would need more, values of forward are computed again in backward instead of being kept, cheap
  /// ones first, matrix products last. `explain` says what that came to. A budget that can't be
  /// reached is a warning, and the program has the lowest peak that was found.
  std::optional<int64_t> memory_budget = std::nullopt;
  /// torch::kHalf or torch::kBFloat16: gradients are averaged in that, as by replicate's
  /// fp16_compress_hook and bf16_compress_hook: cast, divided, reduced, cast back.
  std::optional<at::ScalarType> compress_gradients = std::nullopt;
  CompileBackendOption backend = CompileBackend::Codegen;
  /// Stand-ins for modules that can't be recorded.
  std::vector<std::shared_ptr<Override>> module_override = {};
  /// Rewrites the captured graph, once for each program, before any pass. Inputs and outputs stay
  /// as they are.
  std::function<void(Graph&)> gm_transformation = {};
  /// Run after those of ours that work on operators, in this order, and before fuse and
  /// reuse_memory.
  std::vector<Pass> passes = {};
  /// Names of passes that are left out.
  std::vector<std::string> disabled_passes = {};
  /// The graph after every pass goes to a file here. Empty: none.
  std::string dump_folder = {};
};

}  // namespace tessera
