#include "dtensor/brute_force.h"

#include <tessera/dtensor.h>

#include "dtensor/debug.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <ATen/Context.h>
#include <torch/torch.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace tessera::brute_force {
namespace {

std::map<std::string, std::vector<Case>>& all_cases() {
  static std::map<std::string, std::vector<Case>> cases;
  return cases;
}

at::Tensor draw(const Input& input, at::Generator& generator) {
  const auto& sizes = input.sizes;
  switch (input.kind) {
    case Input::Kind::Normal:
      return at::randn(sizes, generator);
    case Input::Kind::Positive:
      return at::rand(sizes, generator) + 0.5;
    case Input::Kind::Unit:
      return at::rand(sizes, generator) * 0.8 + 0.1;
    case Input::Kind::Index:
      return at::randint(input.bound, sizes, generator, at::TensorOptions(at::kLong));
    case Input::Kind::Bool:
      return at::rand(sizes, generator) > 0.5;
    case Input::Kind::Distinct:
      break;
  }
  const auto count = c10::multiply_integers(sizes);
  return (at::randperm(count, generator).to(at::kFloat) * 0.25 - static_cast<double>(count) / 8)
      .view(sizes);
}

/// What one device gives: results, then gradients of the float inputs.
struct Truth {
  Tensors results;
  Tensors gradients;
};

bool is_differentiable(const at::Tensor& tensor) { return tensor.is_floating_point(); }

/// A scalar that depends on every element of every result, each differently.
at::Tensor weighted_sum(const Tensors& results, const Tensors& weights) {
  at::Tensor total;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined() || !results[i].requires_grad()) continue;
    const auto term = (results[i] * weights[i]).sum();
    total = total.defined() ? total + term : term;
  }
  return total;
}

Tensors weights_for(const Tensors& results) {
  Tensors weights;
  for (const auto& result : results) {
    weights.push_back(result.defined()
                          ? at::linspace(0.5, 1.5, std::max<int64_t>(result.numel(), 1),
                                         at::TensorOptions(result.device()))
                                .narrow(0, 0, result.numel())
                                .view(result.sizes())
                          : at::Tensor());
  }
  return weights;
}

Truth truth_of(const Case& test, const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) {
    leaves.push_back(input.clone());
    if (test.backward && is_differentiable(input)) leaves.back().requires_grad_();
  }
  Truth truth{test.call(leaves), {}};
  if (!test.backward) return truth;
  const auto total = weighted_sum(truth.results, weights_for(truth.results));
  if (total.defined()) total.backward();
  for (const auto& leaf : leaves) truth.gradients.push_back(leaf.grad());
  for (auto& result : truth.results) result = result.defined() ? result.detach() : result;
  return truth;
}

/// Weights that lie as the results do, so that gradients come sharded too.
Tensors placed_as(Tensors weights, const Tensors& results) {
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].defined() || !is_dtensor(results[i])) continue;
    auto placements = DTensor::of(results[i]).placements();
    for (auto& placement : placements) {
      if (placement.is_partial()) placement = Replicate();
    }
    weights[i] = distribute_tensor(weights[i], DTensor::of(results[i]).mesh(), placements,
                                   /*src_data_rank=*/std::nullopt);
  }
  return weights;
}

std::string text_of(const std::vector<Placements>& placements) {
  std::string text;
  for (const auto& one : placements) text += c10::str(text.empty() ? "" : " ", one);
  return text;
}

/// One attempt on this rank. Every rank comes to the same verdict or throws.
std::string attempt(const Case& test, const Tensors& inputs, const Truth& truth,
                    const DeviceMesh& mesh, const std::vector<Placements>& placements) {
  Tensors parts;
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto part = DTensor::from_local(
        part_for(inputs[i], mesh, placements[i]), mesh, placements[i],
        {.shape = inputs[i].sizes().vec(), .stride = inputs[i].contiguous().strides().vec()});
    if (test.backward && is_differentiable(inputs[i])) part.requires_grad_();
    parts.push_back(part);
  }
  const auto results = test.call(parts);
  const testing::Tolerance tolerance{test.tolerance, test.tolerance};
  const auto compare = [&](const at::Tensor& actual, const at::Tensor& expected,
                           const std::string& what) -> std::string {
    if (!expected.defined()) return "";
    if (!actual.defined()) return expected.any().item<bool>() ? what + " is missing" : "";
    const auto full = is_dtensor(actual) ? DTensor::of(actual).full_tensor().detach() : actual;
    const auto verdict = testing::tensors_equal(full, expected, tolerance);
    return verdict ? "" : what + ": " + verdict.message();
  };
  std::string wrong;
  for (size_t i = 0; i < results.size(); ++i)
    wrong += compare(results[i], truth.results[i], c10::str("result ", i));
  if (!test.backward) return wrong;
  const auto weights = placed_as(weights_for(truth.results), results);
  const auto total = weighted_sum(results, weights);
  if (!total.defined()) {
    for (const auto& gradient : truth.gradients)
      if (gradient.defined()) wrong += "no result has a history";
    return wrong;
  }
  total.backward();
  for (size_t i = 0; i < parts.size(); ++i)
    wrong += compare(parts[i].grad(), truth.gradients[i], c10::str("gradient of input ", i));
  return wrong;
}

}  // namespace

bool has_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchema({name, ""}).has_value();
}

at::Tensor call_by_name(const std::string& name, std::vector<c10::IValue> arguments) {
  const auto dot = name.find('.');
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto op = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
  if (!op) return {};
  op->callBoxed(arguments);
  return arguments.front().toTensor();
}

Cases::Cases(const std::string& family, std::vector<Case> cases) {
  auto& known = all_cases()[family];
  for (auto& test : cases) known.push_back(std::move(test));
}

std::vector<std::string> families() {
  std::vector<std::string> names;
  for (const auto& [name, cases] : all_cases()) names.push_back(name);
  return names;
}

namespace {

/// Cases of a family with their inputs and what one device makes of them.
struct Prepared {
  std::vector<const Case*> tried;
  std::vector<Tensors> inputs;
  std::vector<Truth> truths;
  std::vector<std::string> failed;  // by themselves, without ranks
};

Prepared prepare(const std::string& family, c10::Device device) {
  Prepared prepared;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(testing::test_seed());
  const char* only = std::getenv("TESSERA_DTENSOR_CASE");  // to look at one
  for (const auto& test : all_cases().at(family)) {
    if (only != nullptr && test.name != std::string(only)) continue;
    Tensors inputs;
    for (const auto& input : test.inputs) inputs.push_back(draw(input, generator).to(device));
    try {
      prepared.truths.push_back(truth_of(test, inputs));
    } catch (const c10::Error& error) {
      prepared.failed.push_back(family + '/' + test.name +
                                " without ranks: " + error.what_without_backtrace());
      continue;
    }
    prepared.inputs.push_back(std::move(inputs));
    prepared.tried.push_back(&test);
  }
  return prepared;
}

/// On this rank. Failures are gtest's.
Report try_all(const std::string& family, const Prepared& prepared, const DeviceMesh& mesh,
               Range range, double share) {
  const auto mesh_shape = mesh.shape();
  std::mt19937_64 random(testing::test_seed());
  dtensor::DispatchLog log;
  Report report;
  for (size_t i = 0; i < prepared.tried.size(); ++i) {
    int failures = 0;
    for (const auto& placements :
         placements_to_try(prepared.inputs[i], mesh_shape, range, share, random)) {
      ++report.calls;
      std::string wrong;
      try {
        wrong =
            attempt(*prepared.tried[i], prepared.inputs[i], prepared.truths[i], mesh, placements);
      } catch (const c10::DistBackendError&) {
        throw;  // the ranks are out of step: nothing that follows can be trusted
      } catch (const c10::Error& error) {
        wrong = std::string("threw: ") + error.what_without_backtrace();
      }
      if (wrong.empty() || ++failures > 2) continue;
      ADD_FAILURE() << family << '/' << prepared.tried[i]->name << " rank " << rank() << " of "
                    << c10::IntArrayRef(mesh_shape) << ", inputs " << text_of(placements) << ": "
                    << wrong;
    }
  }
  for (const auto& [name, entry] : log.entries()) {
    (entry.without_rule > 0 ? report.without_rule : report.operators).insert(name);
    if (entry.kept_sharded > 0) report.kept_sharded.insert(name);
  }
  return report;
}

}  // namespace

Report try_family(const std::string& family, const std::vector<int64_t>& mesh_shape, Range range,
                  double share) {
  Report report;
  std::mutex mutex;
  // Drawn before the ranks start: the generator of the process is shared by its threads.
  const auto prepared = prepare(family, at::kCPU);
  for (const auto& failure : prepared.failed) ADD_FAILURE() << failure;
  const auto body = [&] {
    const auto own =
        try_all(family, prepared, init_device_mesh(torch::kCPU, mesh_shape), range, share);
    const std::lock_guard lock(mutex);
    if (rank() == 0) report = own;
  };
  testing::run_threads(static_cast<int>(c10::multiply_integers(mesh_shape)), body,
                       {.backend = "shm",
                        .timeout = std::chrono::seconds(30),
                        .deadline = std::chrono::minutes(14)});
  return report;
}

void try_family_on(const testing::DeviceCase& where, const std::string& family, Range range,
                   double share) {
  testing::run_on(where, [&] {
    const auto device = testing::run_device();
    at::globalContext().setAllowTF32CuDNN(false);  // kernels of some shapes round to it, not all
    const auto prepared = prepare(family, device);
    // Some make tensors of their own on the CPU.
    EXPECT_GT(prepared.tried.size(), prepared.failed.size());
    try_all(family, prepared, init_device_mesh(device.type(), {world_size()}), range, share);
  });
}

}  // namespace tessera::brute_force
