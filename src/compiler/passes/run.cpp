#include "compiler/passes/run.h"

#include "base/text.h"
#include "compiler/ir/verify.h"
#include "compiler/passes/fuse_pointwise.h"
#include "compiler/passes/passes.h"
#include "parallel/pattern.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

namespace tessera::compiler {
namespace {

using Function = void (*)(Graph&);
using BucketFunction = void (*)(Graph&, const BucketCaps&);

struct Entry {
  const char* name;
  Function run = nullptr;
  BucketFunction run_with_caps = nullptr;
};

constexpr std::array kPasses = {
    Entry{"skip_overwritten", skip_overwritten},
    Entry{"remove_dead_code", remove_dead_code},
    Entry{"merge_equal", merge_equal},
    Entry{"drop_again", drop_again},
    Entry{"fold_constants", fold_constants},
    Entry{"compress_to_bfloat16", [](Graph& graph) { compress(graph, at::kBFloat16); }},
    Entry{"compress_to_float16", [](Graph& graph) { compress(graph, at::kHalf); }},
    Entry{"bucket_all_reduces", nullptr, bucket_all_reduces},
    Entry{"bucket_all_reduces_by_concat", nullptr, bucket_all_reduces_by_concat},
    Entry{"bucket_all_reduces_by_size", nullptr, bucket_all_reduces_by_size},
    Entry{"bucket_reduce_scatters", nullptr, bucket_reduce_scatters},
    Entry{"bucket_all_gathers", nullptr, bucket_all_gathers},
    Entry{"launch_early", launch_early},
    Entry{"schedule_waits", schedule_waits},
    Entry{"fuse_pointwise", fuse_pointwise},
    Entry{"reuse_memory", reuse_memory},
};

struct Alias {
  const char* upstream;
  const char* ours;
};

constexpr std::array kAliases = {
    Alias{"fuse_ddp_with_coalesced_op", "bucket_all_reduces"},
    Alias{"fuse_ddp_with_concat_op", "bucket_all_reduces_by_concat"},
    Alias{"schedule_comm_wait", "schedule_waits"},
};

std::string our_name(const std::string& name) {
  const auto found = std::find_if(kAliases.begin(), kAliases.end(),
                                  [&](const Alias& each) { return each.upstream == name; });
  return found == kAliases.end() ? name : found->ours;
}

void check_disabled(const std::vector<Pass>& passes, const std::vector<std::string>& disabled) {
  auto known = pass_names();
  for (const Pass& pass : passes) known.push_back(pass.name);
  for (const std::string& name : disabled) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(),
                      "compile: expected names of passes to disable, got '", name,
                      "'; nearest names: ", format_list(parallel::nearest_names(name, known)));
  }
}

void dump(const Graph& graph, const std::string& folder, size_t number, const std::string& name) {
  std::filesystem::create_directories(folder);
  const auto digits = std::to_string(number);
  const auto path = std::filesystem::path(folder) /
                    ((digits.size() < 2 ? "0" + digits : digits) + "-" + name + ".txt");
  std::ofstream file(path);
  file << graph;
  file.close();
  TORCH_CHECK(!file.fail(), "compile: could not write the graph after ", name, " to ",
              path.string(), "; check the dump folder");
}

}  // namespace

void run_passes(Graph& graph, const std::vector<Pass>& passes, const RunOptions& options) {
  check_disabled(passes, options.disabled);
  const auto is_disabled = [&](const Pass& pass) {
    return std::any_of(
        options.disabled.begin(), options.disabled.end(),
        [&](const std::string& name) { return our_name(name) == our_name(pass.name); });
  };
  verify(graph, "capture");
  if (!options.dump_folder.empty()) dump(graph, options.dump_folder, 0, "captured");
  int64_t ran = 0;
  for (size_t i = 0; i < passes.size(); ++i) {
    if (is_disabled(passes[i])) continue;
    passes[i].run(graph);
    verify(graph, passes[i].name);
    ++ran;
    if (!options.dump_folder.empty()) dump(graph, options.dump_folder, i + 1, passes[i].name);
  }
  counters()["passes"] = ran;
}

std::vector<std::string> pass_names() {
  std::vector<std::string> names;
  for (const Entry& each : kPasses) names.emplace_back(each.name);
  for (const Alias& each : kAliases) names.emplace_back(each.upstream);
  return names;
}

Pass find_pass(const std::string& name, std::optional<int64_t> bucket_bytes) {
  TORCH_CHECK_VALUE(!bucket_bytes || *bucket_bytes > 0,
                    "compile: expected a bucket size of at least 1 byte, got ",
                    bucket_bytes.value_or(0));
  const std::string ours = our_name(name);
  for (const Entry& each : kPasses) {
    if (ours != each.name) continue;
    if (each.run != nullptr) return {ours, each.run};
    BucketCaps caps;
    if (bucket_bytes) caps = {.first = *bucket_bytes, .later = *bucket_bytes};
    return {ours, [run = each.run_with_caps, caps](Graph& graph) { run(graph, caps); }};
  }
  TORCH_CHECK_VALUE(false, "compile: expected the name of a pass, got '", name,
                    "'; nearest names: ", format_list(parallel::nearest_names(name, pass_names())));
}

}  // namespace tessera::compiler
