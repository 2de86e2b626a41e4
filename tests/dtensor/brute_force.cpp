#include "dtensor/brute_force.h"

#include <tessera/dtensor.h>

#include "dtensor/dispatch_log.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <torch/torch.h>

#include <map>
#include <mutex>
#include <random>

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
                          ? at::linspace(0.5, 1.5, std::max<int64_t>(result.numel(), 1))
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

/// Placements to try for one input on one mesh dimension.
std::vector<Placement> choices_for(const at::Tensor& input) {
  std::vector<Placement> choices{Replicate()};
  for (int64_t dim = 0; dim < input.dim(); ++dim) choices.push_back(Shard(dim));
  if (input.is_floating_point()) choices.push_back(Partial());
  return choices;
}

/// All placements of all inputs, as numbers in mixed radix.
class Combinations {
 public:
  Combinations(const Tensors& inputs, size_t mesh_ndim) : mesh_ndim_(mesh_ndim) {
    for (const auto& input : inputs) {
      for (size_t dim = 0; dim < mesh_ndim; ++dim) choices_.push_back(choices_for(input));
    }
    for (const auto& choices : choices_) count_ *= static_cast<int64_t>(choices.size());
  }
  int64_t count() const { return count_; }
  std::vector<Placements> at(int64_t number) const {
    std::vector<Placements> result;
    for (size_t i = 0; i < choices_.size(); ++i) {
      if (i % mesh_ndim_ == 0) result.emplace_back();
      const auto radix = static_cast<int64_t>(choices_[i].size());
      result.back().push_back(choices_[i][number % radix]);
      number /= radix;
    }
    return result;
  }

 private:
  size_t mesh_ndim_;
  std::vector<std::vector<Placement>> choices_;
  int64_t count_ = 1;
};

/// This rank's part: for Partial, summands that differ from rank to rank.
at::Tensor part_for(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  auto part = whole;
  for (size_t dim = 0; dim < placements.size(); ++dim) {
    const auto mesh_dim = static_cast<int64_t>(dim);
    const int64_t ranks = mesh.size(mesh_dim);
    const int64_t rank = mesh.local_rank(mesh_dim);
    if (placements[dim].is_shard()) {
      const int64_t size = part.size(placements[dim].dim());
      const int64_t each = (size + ranks - 1) / ranks;
      const int64_t begin = std::min(size, each * rank);
      part = part.narrow(placements[dim].dim(), begin, std::min(each, size - begin));
    } else if (placements[dim].is_partial()) {
      const double rest = 1.0 - 0.25 * static_cast<double>(ranks - 1);
      part = part * (rank == 0 ? rest : 0.25);
    }
  }
  return part.clone();
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

std::vector<int64_t> draw_numbers(int64_t count, double share, bool all, std::mt19937_64& random) {
  std::vector<int64_t> numbers;
  const int64_t wanted =
      all ? count
          : std::min<int64_t>(count, std::max<int64_t>(2, static_cast<int64_t>(share * 200)));
  if (wanted == count) {
    for (int64_t i = 0; i < count; ++i) numbers.push_back(i);
  } else {
    for (int64_t i = 0; i < wanted; ++i)
      numbers.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(count)));
  }
  return numbers;
}

}  // namespace

Cases::Cases(const std::string& family, std::vector<Case> cases) {
  auto& known = all_cases()[family];
  for (auto& test : cases) known.push_back(std::move(test));
}

std::vector<std::string> families() {
  std::vector<std::string> names;
  for (const auto& [name, cases] : all_cases()) names.push_back(name);
  return names;
}

Report try_family(const std::string& family, const std::vector<int64_t>& mesh_shape, double share) {
  Report report;
  std::mutex mutex;
  const auto& cases = all_cases().at(family);
  const auto seed = testing::test_seed();
  // Drawn before the ranks start: the generator of the process is shared by its threads.
  std::vector<Tensors> inputs;
  std::vector<Truth> truths;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (const auto& test : cases) {
    inputs.emplace_back();
    for (const auto& input : test.inputs) inputs.back().push_back(draw(input, generator));
    truths.push_back(truth_of(test, inputs.back()));
  }
  const auto body = [&] {
    const auto mesh = init_device_mesh(torch::kCPU, mesh_shape);
    std::mt19937_64 random(seed);
    dtensor::DispatchLog log;
    int64_t calls = 0;
    for (size_t i = 0; i < cases.size(); ++i) {
      const Combinations combinations(inputs[i], mesh_shape.size());
      const bool all = share >= 1 && (mesh_shape.size() == 1 || cases[i].inputs.size() <= 2);
      int failures = 0;
      for (const auto number : draw_numbers(combinations.count(), share, all, random)) {
        const auto placements = combinations.at(number);
        ++calls;
        std::string wrong;
        try {
          wrong = attempt(cases[i], inputs[i], truths[i], mesh, placements);
        } catch (const c10::DistBackendError&) {
          throw;  // the ranks are out of step: nothing that follows can be trusted
        } catch (const c10::Error& error) {
          wrong = std::string("threw: ") + error.what_without_backtrace();
        }
        if (wrong.empty() || ++failures > 2) continue;
        ADD_FAILURE() << family << '/' << cases[i].name << " rank " << rank() << " of "
                      << c10::IntArrayRef(mesh_shape) << ", inputs " << text_of(placements) << ": "
                      << wrong;
      }
    }
    const std::lock_guard lock(mutex);
    if (rank() != 0) return;
    report.calls = calls;
    for (const auto& [name, entry] : log.entries())
      (entry.without_rule > 0 ? report.without_rule : report.operators).insert(name);
  };
  testing::run_threads(static_cast<int>(c10::multiply_integers(mesh_shape)), body,
                       {.backend = "shm",
                        .timeout = std::chrono::seconds(30),
                        .deadline = std::chrono::minutes(14)});
  return report;
}

}  // namespace tessera::brute_force
