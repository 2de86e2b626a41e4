#include "replicate/init.h"

#include "base/capture.h"
#include "comm/call_check.h"
#include "comm/functional.h"
#include "dtensor/agreement.h"
#include "dtensor/part.h"
#include "nn/composable.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/util/Exception.h>
#include <torch/csrc/api/include/torch/nn/modules/embedding.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <unordered_set>

namespace tessera::detail::replicate {
namespace {

constexpr int64_t kBroadcastBytes = int64_t{250} << 20;

bool has_sparse_gradient(const torch::nn::Module& module) {
  if (const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&module))
    return embedding->options.sparse();
  if (const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&module))
    return bag->options.sparse();
  return false;
}

using Visit = c10::function_ref<void(const torch::nn::Module&, const std::string& prefix)>;

void walk(const torch::nn::Module& module, const std::string& prefix, bool is_root,
          const std::set<const torch::nn::Module*>& ignored, Visit visit) {
  if (ignored.count(&module) || nn::find_state(module, "fully_shard")) return;
  if (!is_root && nn::find_state(module, "replicate")) return;
  visit(module, prefix);
  for (const auto& child : module.named_children())
    walk(*child.value(), prefix + child.key() + ".", false, ignored, visit);
}

std::string describe(const ManagedParameters& parameters, size_t index) {
  const auto& tensor = parameters.tensors[index];
  return dtensor::describe_parameter(parameters.names[index], tensor) +
         (tensor.requires_grad() ? "" : " frozen") +
         (parameters.is_sparse[index] ? " sparse" : "") + dtensor::describe_part(tensor);
}

/// By an operator if the step is recorded, of which it is a part then.
at::Tensor broadcast_whole(const at::Tensor& message, const Group& group, int source) {
  if (capture::observer() != nullptr)
    return comm::functional::wait(comm::functional::broadcast(message, source, group));
  c10d::BroadcastOptions options;
  options.rootRank = source;
  std::vector<at::Tensor> messages{message};
  const auto work = group->getBackend(message.device().type())->broadcast(messages, options);
  if (work) work->wait();
  return message;
}

}  // namespace

CollectedParameters collect_parameters(const torch::nn::Module& module,
                                       const std::set<const torch::nn::Module*>& ignored) {
  CollectedParameters result;
  std::unordered_set<const at::TensorImpl*> seen;
  // One that an ignored module shares with others is ignored.
  for (const auto* part : ignored) {
    for (const auto& tensor : part->parameters()) seen.insert(tensor.unsafeGetTensorImpl());
  }
  walk(module, "", /*is_root=*/true, ignored,
       [&](const torch::nn::Module& part, const std::string& prefix) {
         for (const auto& item : part.named_parameters(/*recurse=*/false)) {
           const auto& tensor = item.value();
           if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
           const auto add = [&](ManagedParameters& to) {
             to.tensors.push_back(tensor);
             to.names.push_back(prefix + item.key());
             to.is_sparse.push_back(has_sparse_gradient(part));
           };
           add(result.all);
           if (tensor.requires_grad()) add(result.managed);
         }
       });
  return result;
}

std::vector<at::Tensor> collect_buffers(const torch::nn::Module& module,
                                        const std::set<const torch::nn::Module*>& ignored) {
  std::vector<at::Tensor> buffers;
  walk(module, "", /*is_root=*/true, ignored,
       [&](const torch::nn::Module& part, const std::string&) {
         for (const auto& item : part.named_buffers(/*recurse=*/false)) {
           if (item.value().defined()) buffers.push_back(item.value());
         }
       });
  return buffers;
}

bool agree(bool own, const Group& group) {
  const comm::Bookkeeping bookkeeping("replicate");
  const auto all = gather_bytes(own ? "1" : "0", group);
  return std::all_of(all.begin(), all.end(), [](const std::string& one) { return one == "1"; });
}

void verify_parameters(const ManagedParameters& parameters, const std::string& options,
                       const Group& group) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < parameters.tensors.size(); ++i) lines.push_back(describe(parameters, i));
  dtensor::check_same_parameters(
      {.caller = "replicate", .kind = "options", .whole = options, .parameters = std::move(lines)},
      group);
}

void broadcast_values(const std::vector<at::Tensor>& tensors, const Group& group, int source) {
  const at::NoGradGuard no_grad;
  const comm::CallNote note("parameters and buffers of replicate");
  std::map<std::pair<std::string, c10::ScalarType>, std::vector<at::Tensor>> kinds;
  for (const auto& tensor : tensors)
    kinds[{tensor.device().str(), tensor.scalar_type()}].push_back(dtensor::local_part(tensor));
  for (const auto& [kind, members] : kinds) {
    for (size_t begin = 0; begin < members.size();) {
      std::vector<at::Tensor> flat;
      size_t end = begin;
      for (int64_t bytes = 0; end < members.size() && bytes < kBroadcastBytes; ++end) {
        flat.push_back(members[end].detach().contiguous().view(-1));
        bytes += static_cast<int64_t>(members[end].nbytes());
      }
      const auto message = broadcast_whole(at::cat(flat), group, source);
      int64_t offset = 0;
      for (; begin < end; ++begin) {
        const auto& member = members[begin];
        member.detach().copy_(message.narrow(0, offset, member.numel()).view(member.sizes()));
        offset += member.numel();
      }
    }
  }
}

std::vector<size_t> find_unused(const std::vector<at::Tensor>& outputs,
                                const std::vector<at::Tensor>& parameters) {
  using torch::autograd::Node;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> to_visit;
  const auto reach = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) to_visit.push_back(node);
  };
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    reach(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!to_visit.empty()) {
    const auto* node = to_visit.back();
    to_visit.pop_back();
    for (const auto& edge : node->next_edges()) reach(edge.function.get());
  }
  std::vector<size_t> unused;
  for (size_t i = 0; i < parameters.size(); ++i) {
    // A parameter that never was in a graph has no accumulator yet.
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameters[i]);
    if (!accumulator || !seen.count(accumulator.get())) unused.push_back(i);
  }
  return unused;
}

namespace {

nn::ParameterOwners& owners() {
  static auto& all = *new nn::ParameterOwners();  // modules may outlive static objects
  return all;
}

}  // namespace

void remember_managed(const ManagedParameters& parameters, const std::string& module_name) {
  for (size_t i = 0; i < parameters.tensors.size(); ++i) {
    const auto owner = owners().find(parameters.tensors[i]);
    TORCH_CHECK_VALUE(!owner, "replicate: expected parameter '", parameters.names[i], "' of ",
                      module_name, " to have no engine yet, but replicate of ", owner.value_or(""),
                      " averages it; replicate parts before the whole, or ignore the part");
  }
  for (const auto& tensor : parameters.tensors) owners().add(tensor, module_name);
}

bool is_managed(const at::Tensor& parameter) { return owners().find(parameter).has_value(); }

void forget_managed(const std::vector<at::Tensor>& parameters) {
  for (const auto& tensor : parameters) owners().remove(tensor);
}

}  // namespace tessera::detail::replicate
