#include "fully_shard/init.h"

#include <tessera/nn/decoder_layers.h>

#include "dtensor/part.h"
#include "nn/composable.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include <cmath>
#include <string>
#include <unordered_set>
#include <vector>

namespace tessera::detail::fully_shard {
namespace {

nn::ParameterOwners& owners() {
  static auto& all = *new nn::ParameterOwners();  // modules may outlive static objects
  return all;
}

void visit(torch::nn::Module& module, const std::string& prefix, bool is_top,
           const Ignored& ignored,
           const std::function<void(torch::nn::Module&, const std::string&)>& function) {
  if (ignored.modules.count(&module)) return;
  if (!is_top && (nn::find_state(module, "fully_shard") || nn::find_state(module, "replicate")))
    return;
  function(module, prefix);
  for (const auto& child : module.named_children())
    visit(*child.value(), prefix + child.key() + ".", false, ignored, function);
}

void broadcast(const at::Tensor& tensor, const Group& group) {
  if (group->getSize() == 1) return;
  std::vector<at::Tensor> message{tensor.contiguous()};
  const auto work = group->getBackend(tensor.device().type())->broadcast(message);
  if (work) work->wait();
  if (!message[0].is_same(tensor)) tensor.copy_(message[0]);
}

}  // namespace

Ignored find_ignored(const torch::nn::Module& module, const FullyShardOptions& options) {
  TORCH_CHECK_VALUE(options.ignored_modules.empty() || options.ignored_states.empty(),
                    "fully_shard: expected ignored_modules or ignored_states, got both; name the "
                    "modules' parameters among the states");
  Ignored ignored;
  for (const auto& one : options.ignored_modules) {
    for (const auto& part : one->modules()) {
      TORCH_CHECK_VALUE(!nn::find_state(*part, "fully_shard"),
                        "fully_shard: expected ignored_modules of ", nn::name_of(module),
                        " that are not sharded, got ", nn::name_of(*part),
                        ", which is; a unit inside another needs no ignoring");
    }
    ignored.modules.insert(&*one);
    for (const auto& tensor : one->parameters())
      ignored.parameters.insert(tensor.unsafeGetTensorImpl());
  }
  for (const auto& tensor : options.ignored_states) {
    TORCH_CHECK_VALUE(
        tensor.defined(),
        "fully_shard: expected parameters as ignored_states, got an undefined tensor");
    ignored.parameters.insert(tensor.unsafeGetTensorImpl());
  }
  return ignored;
}

void visit_own(torch::nn::Module& module, const Ignored& ignored,
               const std::function<void(torch::nn::Module&, const std::string&)>& function) {
  visit(module, "", /*is_top=*/true, ignored, function);
}

std::vector<FoundParameter> find_parameters(const std::vector<torch::nn::Module*>& modules,
                                            const Ignored& ignored,
                                            const MixedPrecision& precision) {
  std::vector<FoundParameter> found;
  std::unordered_set<const at::TensorImpl*> seen;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string& prefix) {
      for (const auto& item : part.named_parameters(/*recurse=*/false)) {
        const auto& tensor = item.value();
        const auto* impl = tensor.unsafeGetTensorImpl();
        if (!tensor.defined() || ignored.parameters.count(impl) || !seen.insert(impl).second)
          continue;
        const auto owner = owners().find(tensor);
        TORCH_CHECK_VALUE(
            !owner, "fully_shard: parameter '", prefix + item.key(), "' of ", nn::name_of(*module),
            " is shared with the unit of ", owner.value_or(""),
            ", but a parameter belongs to one unit; if one module contains the other, shard the "
            "inner one first; otherwise make them one unit: fully_shard({first, second}), or shard "
            "only what contains both");
        found.push_back({.tensor = tensor,
                         .name = prefix + item.key(),
                         .keeps_dtype = keeps_dtype(part, precision)});
      }
    });
  }
  return found;
}

void choose_dims(std::vector<FoundParameter>& parameters, const FullyShardOptions& options) {
  if (!options.shard_placement_fn) return;
  for (auto& [tensor, name, keeps, shard_dim] : parameters) {
    const auto placement = options.shard_placement_fn(tensor);
    if (!placement || tensor.dim() == 0) continue;
    const auto dim = placement->dim();
    const bool is_shard = placement->is_shard() && !placement->is_strided();
    TORCH_CHECK_VALUE(is_shard && dim >= -tensor.dim() && dim < tensor.dim(),
                      "fully_shard: expected shard_placement_fn to give Shard(dim) of one of the ",
                      tensor.dim(), " dimensions of parameter '", name, "', or none, got ",
                      c10::str(*placement));
    shard_dim = dim < 0 ? dim + tensor.dim() : dim;
  }
}

void remember_owner(const std::vector<FoundParameter>& parameters, const std::string& unit) {
  for (const auto& parameter : parameters) owners().add(parameter.tensor, unit);
}

void forget_owner(const std::vector<ShardedParameter>& parameters) {
  for (const auto& parameter : parameters) owners().remove(parameter.parameter());
}

void move_to_device(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                    c10::Device device) {
  const at::NoGradGuard no_grad;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string&) {
      for (auto& item : part.named_parameters(/*recurse=*/false)) {
        if (!ignored.parameters.count(item.value().unsafeGetTensorImpl()))
          item.value().set_data(item.value().to(device));
      }
      for (auto& item : part.named_buffers(/*recurse=*/false)) {
        if (item.value().defined()) item.value().set_data(item.value().to(device));
      }
    });
  }
}

void broadcast_values(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                      const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  const auto send = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || ignored.parameters.count(tensor.unsafeGetTensorImpl())) return;
    const auto local =
        dtensor::has_part(tensor) ? dtensor::part_of(tensor).local() : tensor.detach();
    // Across the copies first, then within each.
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) broadcast(local, mesh.group(dim));
  };
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string&) {
      for (const auto& item : part.named_parameters(/*recurse=*/false)) send(item.value());
      for (const auto& item : part.named_buffers(/*recurse=*/false)) send(item.value());
    });
  }
}

std::vector<CastBuffer> cast_modules(const std::vector<torch::nn::Module*>& modules,
                                     const Ignored& ignored, const MixedPrecision& precision) {
  std::vector<CastBuffer> buffers;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string&) {
      if (keeps_dtype(part, precision)) return cast_around(part);
      if (!precision.buffer_dtype) return;
      for (auto& item : part.named_buffers(/*recurse=*/false)) {
        const auto& buffer = item.value();
        if (!buffer.defined() || !buffer.is_floating_point()) continue;
        buffers.push_back({buffer, buffer.scalar_type(), *precision.buffer_dtype});
        buffers.back().cast(/*full=*/false);
      }
    });
  }
  return buffers;
}

namespace {

/// Calls a member that torch::nn's modules have without a common base for it.
template <class... Modules>
bool reset_as(torch::nn::Module& module) {
  const auto reset = [&]<class M>() {
    auto* known = dynamic_cast<M*>(&module);
    if (known != nullptr) known->reset_parameters();
    return known != nullptr;
  };
  return (reset.template operator()<Modules>() || ...);
}

bool reset_known(torch::nn::Module& module) {
  using namespace torch::nn;
  if (auto* rectifier = dynamic_cast<PReLUImpl*>(&module)) {
    rectifier->weight.fill_(rectifier->options.init());
    return true;
  }
  if (dynamic_cast<MultiheadAttentionImpl*>(&module) != nullptr) return true;  // reset_attention()
  return reset_as<LinearImpl, BilinearImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
                  ConvTranspose2dImpl, ConvTranspose3dImpl, EmbeddingImpl, EmbeddingBagImpl,
                  LayerNormImpl, GroupNormImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
                  InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl, RNNImpl, LSTMImpl,
                  GRUImpl, RNNCellImpl, LSTMCellImpl, GRUCellImpl, tessera::nn::RMSNormImpl,
                  tessera::nn::RotaryEmbeddingImpl>(module);
}

struct MadeTensor {
  std::string name;
  at::Tensor tensor;
  int64_t version;  // when it got memory
};
/// A module that was built without memory, and what it has got.
struct Made {
  torch::nn::Module* module;
  std::string where;  // "Block 'blocks.0'"
  std::vector<MadeTensor> tensors = {};
};

at::Tensor unwritten_like(const at::Tensor& tensor, c10::Device device) {
  auto made = at::empty_like(tensor, tensor.options().device(device));
  // Of what is left so, was_written() tells.
  if (made.is_floating_point() || made.is_complex()) made.fill_(std::nan(""));
  return made;
}

/// By what it holds, since writes through data() are not counted; integers have nothing that they
/// could not be.
bool was_written(const MadeTensor& made) {
  const auto& tensor = made.tensor;
  const bool has_nan = tensor.is_floating_point() || tensor.is_complex();
  return tensor.numel() == 0 || tensor._version() > made.version ||
         (has_nan && !tensor.isnan().all().item<bool>());
}

std::string names_of(const std::vector<MadeTensor>& tensors) {
  std::string names;
  for (const auto& made : tensors) names += (names.empty() ? "'" : ", '") + made.name + "'";
  return names;
}

void give_memory(const std::string& name, const at::Tensor& tensor, c10::Device device,
                 Made& made) {
  if (!tensor.defined() || !tensor.is_meta()) return;
  tensor.unsafeGetTensorImpl()->shallow_copy_from(unwritten_like(tensor, device).getIntrusivePtr());
  made.tensors.push_back({name, tensor, tensor._version()});
}

Made give_memory(torch::nn::Module& part, const std::string& path, c10::Device device) {
  Made made{.module = &part, .where = nn::name_of(part)};
  if (!path.empty()) made.where += " '" + path.substr(0, path.size() - 1) + "'";
  for (const auto& item : part.named_parameters(/*recurse=*/false))
    give_memory(item.key(), item.value(), device, made);
  for (const auto& item : part.named_buffers(/*recurse=*/false))
    give_memory(item.key(), item.value(), device, made);
  return made;
}

/// After its out_proj has started as every Linear does, whose bias it sets.
void reset_attention(torch::nn::Module& module) {
  if (auto* attention = dynamic_cast<torch::nn::MultiheadAttentionImpl*>(&module))
    attention->_reset_parameters();
}

void check_written(const char* function, const Made& made) {
  for (const auto& one : made.tensors) {
    TORCH_CHECK_VALUE(was_written(one), function, ": expected param_init_fn to give values to '",
                      one.name, "' of ", made.where,
                      ", which was built without memory, but it wrote none; it is called with each "
                      "such module, and those that are not torch::nn's have no others");
  }
}

}  // namespace

void materialise(const char* function, const std::vector<torch::nn::Module*>& modules,
                 const Ignored& ignored, const FullyShardOptions& options, c10::Device device) {
  const at::NoGradGuard no_grad;
  std::vector<Made> all;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string& path) {
      auto made = give_memory(part, path, device);
      if (made.tensors.empty()) return;
      TORCH_CHECK_VALUE(reset_known(part) || options.param_init_fn, function, ": ", made.where,
                        " has parameters or buffers without memory (on the meta device): ",
                        names_of(made.tensors),
                        "; how they start is not known for modules that are not torch::nn's: pass "
                        "param_init_fn, which is called with each such module");
      all.push_back(std::move(made));
    });
  }
  for (const auto& made : all) reset_attention(*made.module);
  if (!options.param_init_fn) return;
  // When all have memory: it may write to the parts of the module that it is called with.
  for (const auto& made : all) options.param_init_fn(*made.module);
  for (const auto& made : all) check_written(function, made);
}

}  // namespace tessera::detail::fully_shard
