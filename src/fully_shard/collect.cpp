#include "fully_shard/collect.h"

#include "dtensor/part.h"
#include "nn/composable.h"
#include "nn/parameter_owners.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <unordered_set>

namespace tessera::sharded {
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
                                            const Ignored& ignored) {
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
        TORCH_CHECK_VALUE(!owner, "fully_shard: parameter '", prefix + item.key(), "' of ",
                          nn::name_of(*module), " is shared with the unit of ", owner.value_or(""),
                          ", but a parameter belongs to one unit; make the modules that share it "
                          "one unit: fully_shard({first, second}), or shard only what contains "
                          "both");
        found.push_back({tensor, prefix + item.key()});
      }
    });
  }
  return found;
}

void remember_owner(const std::vector<FoundParameter>& parameters, const std::string& unit) {
  for (const auto& parameter : parameters) owners().add(parameter.tensor, unit);
}

void forget_owner(const std::vector<TwoFaced>& parameters) {
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

void cast_buffers(const std::vector<torch::nn::Module*>& modules, const Ignored& ignored,
                  at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  for (auto* module : modules) {
    visit_own(*module, ignored, [&](torch::nn::Module& part, const std::string&) {
      for (auto& item : part.named_buffers(/*recurse=*/false)) {
        auto& buffer = item.value();
        if (buffer.defined() && buffer.is_floating_point()) buffer.set_data(buffer.to(dtype));
      }
    });
  }
}

}  // namespace tessera::sharded
