// From a plan to the modules that it names.
#include <tessera/parallelize.h>

#include "base/text.h"
#include "nn/composable.h"
#include "parallel/pattern.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace tessera {
namespace parallel {
namespace {

struct Found {
  torch::nn::Module* module;
  std::string path;
};

std::vector<std::string> child_names(const std::vector<Found>& parents) {
  std::vector<std::string> names;
  for (const auto& parent : parents) {
    for (const auto& child : parent.module->named_children()) {
      if (std::find(names.begin(), names.end(), child.key()) == names.end())
        names.push_back(child.key());
    }
  }
  return names;
}

void warn_of_no_match(const std::string& pattern, const std::string& component,
                      const std::vector<Found>& parents) {
  const auto& first = parents.front();
  TORCH_WARN("parallelize_module: plan entry '", pattern, "' names no module: '", component,
             "' matches no child of ",
             first.path.empty() ? nn::name_of(*first.module) : "'" + first.path + "'",
             parents.size() > 1 ? c10::str(" and ", parents.size() - 1, " others") : "",
             "; nearest names: ", format_list(nearest_names(component, child_names(parents))));
}

/// The modules that a pattern names, each once; a warning if there are none.
std::vector<Found> find_modules(torch::nn::Module& root, const std::string& pattern) {
  std::vector<Found> level = {{&root, ""}};
  for (const auto& component : split_components(pattern)) {
    std::vector<Found> below;
    for (const auto& parent : level) {
      const auto prefix = parent.path.empty() ? "" : parent.path + ".";
      for (const auto& child : parent.module->named_children()) {
        // One module may be registered under two names.
        const bool is_known = std::any_of(below.begin(), below.end(), [&](const auto& found) {
          return found.module == child.value().get();
        });
        if (!is_known && matches(component, child.key()))
          below.push_back({child.value().get(), prefix + child.key()});
      }
    }
    if (below.empty()) {
      warn_of_no_match(pattern, component, level);
      return {};
    }
    level = std::move(below);
  }
  return level;
}

}  // namespace
}  // namespace parallel

DeviceMesh detail::require_current_mesh(const char* function) {
  auto mesh = current_mesh();
  TORCH_CHECK_VALUE(mesh, function, ": expected a mesh, or a MeshScope around the call, got ",
                    "neither; pass one, e.g. mesh[\"tp\"]");
  return *mesh;
}

void detail::parallelize(torch::nn::Module& module, const DeviceMesh& mesh,
                         const ParallelPlan& plan, const ParallelizeOptions& options) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "parallelize_module: expected a 1-D mesh for ",
                    nn::name_of(module), ", got ", mesh.ndim(), "-D ", c10::str(mesh),
                    "; slice it first, e.g. mesh[\"tp\"]");
  TORCH_CHECK_VALUE(!options.src_data_rank ||
                        (*options.src_data_rank >= 0 && *options.src_data_rank < mesh.size()),
                    "parallelize_module: expected a src_data_rank from 0 to ", mesh.size() - 1,
                    ", an index along the mesh, got ", options.src_data_rank.value_or(0));
  for (const auto& entry : plan.entries())
    TORCH_CHECK_TYPE(entry.style, "parallelize_module: expected a ParallelStyle for plan entry '",
                     entry.pattern, "' of ", nn::name_of(module), ", got null");
  if (plan.entries().empty()) {
    TORCH_WARN("parallelize_module: no plan for ", nn::name_of(module),
               "; nothing is parallelized");
    return;
  }
  for (const auto& entry : plan.entries()) {
    for (const auto& found : parallel::find_modules(module, entry.pattern))
      entry.style->apply({*found.module, mesh, found.path, options.src_data_rank});
  }
}

}  // namespace tessera
