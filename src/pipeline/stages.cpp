#include "pipeline/stages.h"

#include <tessera/dtensor.h>

#include "base/text.h"
#include "dtensor/part.h"
#include "fully_shard/init.h"
#include "fully_shard/state_impl.h"
#include "replicate/state_impl.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace tessera::detail::pipeline {
namespace {

using torch::nn::SequentialImpl;

std::vector<std::string> child_names(const SequentialImpl& net) {
  std::vector<std::string> names;
  for (const auto& child : net.named_children()) names.push_back(child.key());
  return names;
}

/// The largest stage as small as can be; of those the most even.
std::vector<size_t> balanced(const std::vector<double>& sizes, size_t stages) {
  using Cost = std::pair<double, double>;  // of the largest; squares, summed
  const size_t count = sizes.size();
  std::vector<std::vector<Cost>> best(stages + 1, std::vector<Cost>(count + 1, {HUGE_VAL, 0}));
  std::vector<std::vector<size_t>> begin(stages + 1, std::vector<size_t>(count + 1, 0));
  best[0][0] = {0, 0};
  for (size_t stage = 1; stage <= stages; ++stage) {
    for (size_t end = stage; end <= count; ++end) {
      double size = 0;
      for (size_t first = end; first-- > stage - 1;) {
        size += sizes[first];
        const auto& [largest, squares] = best[stage - 1][first];
        const Cost cost{std::max(largest, size), squares + size * size};
        if (cost >= best[stage][end]) continue;
        best[stage][end] = cost;
        begin[stage][end] = first;
      }
    }
  }
  std::vector<size_t> borders(stages);
  for (size_t stage = stages, end = count; stage > 0; --stage)
    end = borders[stage - 1] = begin[stage][end];
  return borders;
}

std::vector<size_t> given_borders(const std::vector<std::string>& names,
                                  const std::vector<std::string>& points) {
  std::vector<size_t> borders{0};
  for (const auto& point : points) {
    const auto found = std::ranges::find(names, point);
    TORCH_CHECK_VALUE(found != names.end(),
                      "pipeline: expected split_points to be names of the "
                      "net's children, got '",
                      point, "'; there are: ", format_list(names));
    const auto index = static_cast<size_t>(found - names.begin());
    TORCH_CHECK_VALUE(index > borders.back(),
                      "pipeline: expected split_points in the order of the "
                      "net's children and after the first, got '",
                      point, "' after '", names[borders.back()],
                      "'; the first stage begins without one");
    borders.push_back(index);
  }
  return borders;
}

size_t end_of(const SequentialImpl& net, const std::vector<size_t>& borders, size_t stage) {
  return stage + 1 < borders.size() ? borders[stage + 1] : net.size();
}

/// Calls `visit` with parameters and buffers and their names in the net.
template <class Visit>
void for_each_tensor(const SequentialImpl& net, const std::vector<size_t>& borders, size_t stage,
                     const Visit& visit) {
  const auto children = net.named_children();
  for (size_t i = borders[stage]; i < end_of(net, borders, stage); ++i) {
    const auto& [name, child] = std::pair(children[i].key(), children[i].value());
    for (const auto& item : child->named_parameters()) visit(name + "." + item.key(), item.value());
    for (const auto& item : child->named_buffers()) visit(name + "." + item.key(), item.value());
  }
}

void check_untouched(const SequentialImpl& net) {
  for (const auto& module : net.modules()) {
    for (const auto& function : nn::applied_functions(*module)) {
      TORCH_CHECK_VALUE(function != "replicate" && function != "fully_shard",
                        "pipeline: expected a net that is not distributed, but ", function,
                        " was applied to a ", nn::name_of(*module),
                        " of it; apply it to the stages of the pipeline, afterwards");
    }
  }
}

/// Throws if a tensor has gradients, or values, on more than one rank.
void check_untied(const SequentialImpl& net, const std::vector<size_t>& borders,
                  const std::vector<int>& stage_ranks) {
  std::unordered_map<const at::TensorImpl*, std::pair<std::string, size_t>> stages;
  for (size_t stage = 0; stage < borders.size(); ++stage) {
    for_each_tensor(net, borders, stage, [&](const std::string& name, const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      TORCH_CHECK_VALUE(!is_dtensor(tensor), "pipeline: expected plain parameters, but '", name,
                        "' is distributed; cut the net first and give the stages of the pipeline "
                        "to parallelize_module");
      const auto [found, is_first] = stages.try_emplace(tensor.unsafeGetTensorImpl(), name, stage);
      const auto& [other, before] = found->second;
      TORCH_CHECK_VALUE(is_first || stage_ranks[before] == stage_ranks[stage],
                        "pipeline: expected each parameter and buffer on one rank, but '", other,
                        "' of stage ", before, " on rank ", stage_ranks[before], " and '", name,
                        "' of stage ", stage, " on rank ", stage_ranks[stage],
                        " are the same tensor; put both into one stage, take ZBVZeroBubble, which "
                        "has the first and the last on one rank, or give each a tensor of its own");
    });
  }
}

/// See take_stages.
void hold_elsewhere(at::Tensor tensor, int64_t owner) {
  const c10::Device device = tensor.is_meta() ? c10::Device(c10::kCPU) : tensor.device();
  const auto nothing = dtensor::empty_local(tensor.options().device(device));
  tensor.mutable_grad() = at::Tensor();
  if (tensor.is_meta()) {
    auto form = at::empty({0}, tensor.options().device(device));
    form.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    tensor.unsafeGetTensorImpl()->shallow_copy_from(form.getIntrusivePtr());
  }
  const DeviceMesh mesh(device.type(), {owner});
  dtensor::become_distributed(tensor, nothing, dtensor::make_spec(mesh, {Replicate()}));
}

void place(nn::Sequential& stage, const PipelineOptions& options) {
  if (!options.device) return;
  const at::NoGradGuard no_grad;
  FullyShardOptions like;
  like.param_init_fn = options.param_init_fn;
  fully_shard::materialise("pipeline", {&*stage}, {}, like, *options.device);
  stage->to(*options.device);
}

/// `make` on every rank; if it throws on one, all do, each rank its own error.
template <class F>
void agree_on(const Group& group, F make) {
  std::exception_ptr own;
  std::string problem;
  try {
    make();
  } catch (const c10::Error& error) {
    own = std::current_exception();
    problem = error.what_without_backtrace();
  } catch (const std::exception& error) {
    own = std::current_exception();
    problem = error.what();
  }
  const auto problems = gather_bytes(problem, group);
  if (own) std::rethrow_exception(own);
  for (size_t other = 0; other < problems.size(); ++other)
    TORCH_CHECK(problems[other].empty(), "pipeline: rank ", other,
                " could not place its stages: ", problems[other]);
}

}  // namespace

std::vector<size_t> find_borders(const SequentialImpl& net, const PipelineOptions& options,
                                 size_t stages) {
  check_untouched(net);
  TORCH_CHECK_VALUE(net.size() >= stages, "pipeline: expected a Sequential of at least ", stages,
                    " modules, one for each stage, got ", net.size(),
                    "; take fewer ranks or stages, or put smaller modules into it");
  if (!options.split_points.empty()) {
    auto borders = given_borders(child_names(net), options.split_points);
    TORCH_CHECK_VALUE(borders.size() == stages, "pipeline: expected ", stages - 1,
                      " split_points for ", stages, " stages, got ", borders.size() - 1);
    return borders;
  }
  std::vector<double> sizes;
  for (const auto& child : net.named_children()) {
    double size = 0;
    for (const auto& parameter : child.value()->parameters())
      size += static_cast<double>(parameter.numel());
    sizes.push_back(size);
  }
  return balanced(sizes, stages);
}

void check_agreement(const SequentialImpl& net, const std::vector<size_t>& borders,
                     const PipelineTable& table, const PipelineOptions& options,
                     const Group& group) {
  std::ostringstream parameters;
  for (const auto& item : net.named_parameters())
    parameters << item.key() << " " << item.value().sizes() << " "
               << c10::toString(item.value().scalar_type()) << "\n";
  const std::vector<std::pair<const char*, std::string>> facts{
      {"parameters of the net", parameters.str()},
      {"borders between stages", c10::str(c10::Join(" ", borders))},
      {"schedule", c10::str(table)},
      {"loss_fn (every rank gives it)", options.loss_fn ? "one" : "none"},
      {"loss_reduction", std::to_string(static_cast<int>(options.loss_reduction))}};
  for (const auto& [what, own] : facts) {
    const auto all = gather_bytes(own, group);
    for (size_t other = 0; other < all.size(); ++other) {
      TORCH_CHECK_VALUE(all[other] == all[0],
                        "pipeline: expected the same net and options on all ranks of the group, "
                        "but rank ",
                        other, " has other ", what, " than rank 0: ", printable(all[other], "\n"),
                        " in place of ", printable(all[0], "\n"), "; make them alike");
    }
  }
}

std::vector<nn::Sequential> take_stages(SequentialImpl& net, const std::vector<size_t>& borders,
                                        const PipelineTable& table, const PipelineOptions& options,
                                        const Group& group) {
  check_untied(net, borders, table.stage_ranks);
  const int own_rank = rank(group);
  const auto names = child_names(net);
  std::vector<nn::Sequential> stages;
  agree_on(group, [&] {  // before another stage loses its memory
    for (size_t stage = 0; stage < borders.size(); ++stage) {
      if (table.stage_ranks[stage] != own_rank) continue;
      nn::Sequential own;
      for (size_t i = borders[stage]; i < end_of(net, borders, stage); ++i)
        own->push_back(names[i], *(net.begin() + static_cast<std::ptrdiff_t>(i)));
      place(own, options);
      stages.push_back(std::move(own));
    }
  });
  std::unordered_set<const at::TensorImpl*> done;
  for (size_t stage = 0; stage < borders.size(); ++stage) {
    const int owner = table.stage_ranks[stage];
    if (owner == own_rank) continue;
    const int64_t world_rank = ranks(group)[static_cast<size_t>(owner)];
    for_each_tensor(net, borders, stage, [&](const std::string&, const at::Tensor& tensor) {
      if (tensor.defined() && done.insert(tensor.unsafeGetTensorImpl()).second)
        hold_elsewhere(tensor, world_rank);
    });
  }
  return stages;
}

}  // namespace tessera::detail::pipeline
