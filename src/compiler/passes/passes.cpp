#include "compiler/passes/passes.h"

#include "base/text.h"
#include "compiler/ir/text.h"
#include "compiler/ir/verify.h"
#include "compiler/passes/fuse.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <variant>

namespace tessera::compiler {
namespace {

std::vector<std::string> joined(const std::vector<std::vector<std::string>>& lists) {
  std::vector<std::string> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

using Function = void (*)(Graph&);
using BucketFunction = void (*)(Graph&, const Caps&);
using Names = std::vector<std::string>;

struct Entry {
  const char* name;
  std::variant<Function, BucketFunction> run;
  Names after = {};  // those that must have run before it, if they run at all
  Names needs = {};  // those that must have run before it
  bool once = false;
};

/// The order that passes demand of any list; pipeline.cpp has the one that is run.
const std::vector<Entry>& all_passes() {
  static const Names simplify = {"skip_overwritten", "remove_dead_code", "fold_constants",
                                 "merge_equal"};
  static const Names compress_to = {"compress_to_bfloat16", "compress_to_float16"};
  static const Names bucket = {"bucket_all_reduces",         "bucket_all_reduces_by_concat",
                               "bucket_all_reduces_by_size", "bucket_reduce_scatters",
                               "bucket_all_gathers",         "compress_to_bfloat16",
                               "compress_to_float16",        "comm_fusion_with_concat"};
  static const Names of_optimizer = {"remove_copy_from_optimizer", "split_fused_optimizer",
                                     "iter_move_grads_and_optimizers"};
  static const std::vector<Entry> passes = {
      {"skip_overwritten", skip_overwritten},
      {"remove_dead_code", remove_dead_code},
      {"fold_constants", fold_constants},
      {"merge_equal", merge_equal},
      // The marks keep recomputed values from being merged.
      {"drop_recompute_marks", drop_recompute_marks, {"merge_equal"}},
      {"launch_early", launch_early},
      {"compress_to_bfloat16", [](Graph& graph) { compress(graph, at::kBFloat16); }},
      {"compress_to_float16", [](Graph& graph) { compress(graph, at::kHalf); }},
      // A bucket has one dtype, and divides once.
      {"bucket_all_reduces", bucket_all_reduces, compress_to},
      {"bucket_all_reduces_by_concat", bucket_all_reduces_by_concat, compress_to},
      {"bucket_all_reduces_by_size", bucket_all_reduces_by_size, compress_to},
      {"bucket_reduce_scatters", bucket_reduce_scatters, compress_to},
      {"bucket_all_gathers", bucket_all_gathers},
      // A wait belongs to a bucket.
      {"schedule_waits", schedule_waits, bucket},
      {"comm_fusion_with_concat", comm_fusion_with_concat, compress_to, {}, true},
      {"remove_copy_from_optimizer", remove_copy_from_optimizer, {}, {}, true},
      // Parts belong to buckets; copies of parameters would tie them together.
      {"split_fused_optimizer",
       split_fused_optimizer,
       joined({bucket, {"schedule_waits"}}),
       {"remove_copy_from_optimizer"},
       true},
      // The part of the last bucket moves, with the wait for it.
      {"iter_move_grads_and_optimizers",
       iter_move_grads_and_optimizers,
       joined({bucket, {"schedule_waits"}}),
       {"remove_copy_from_optimizer", "split_fused_optimizer"},
       true},
      // Only kernels gain by these.
      {"replace_random", replace_random,
       joined({simplify, bucket, of_optimizer, {"drop_recompute_marks"}})},
      {"decompose", decompose, joined({simplify, bucket, of_optimizer, {"drop_recompute_marks"}})},
      {"join_casts", join_casts,
       joined({simplify, bucket, of_optimizer, {"drop_recompute_marks"}})},
      // merge_equal would take the copies away; those of the others are made by then.
      {"recompute", recompute,
       joined({simplify,
               bucket,
               of_optimizer,
               {"drop_recompute_marks", "replace_random", "decompose", "join_casts"}})},
      // A kernel hides the operators that those look for.
      {"fuse", fuse,
       joined(
           {simplify,
            bucket,
            of_optimizer,
            {"drop_recompute_marks", "replace_random", "decompose", "join_casts", "recompute"}})},
      // No pass may move a node past one that overwrites its arguments.
      {"reuse_memory", reuse_memory,
       joined({simplify,
               bucket,
               of_optimizer,
               {"drop_recompute_marks", "launch_early", "schedule_waits", "fuse"}})},
      // An update writes copies of parameters until memory is reused.
      {"update_early", update_early, {"reuse_memory"}},
  };
  return passes;
}

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

/// What callers of the program know of the graph, line by line.
std::vector<std::string> seen_from_outside(const Graph& graph) {
  std::vector<std::string> lines;
  std::map<ValueId, std::string> names;
  for (const GraphInput& input : graph.inputs) {
    names[input.value] = quote(input.name);
    lines.push_back(c10::str("input ", text_of(graph.type(input.value)), " = ", name_of(input.kind),
                             " ", quote(input.name)));
  }
  for (const GraphOutput& output : graph.outputs) {
    const bool is_write = output.kind == OutputKind::Write;
    const std::string what = output.value == kNoValue ? " nothing" : "";
    lines.push_back(output.kind == OutputKind::Result
                        ? "return" + what
                        : (is_write ? "write" : "gradient") + what + (is_write ? " to " : " of ") +
                              names[output.target]);
  }
  return lines;
}

void check_seen(const Pass& pass, const std::vector<std::string>& before, const Graph& graph) {
  const auto after = seen_from_outside(graph);
  const auto [was, is] = std::mismatch(before.begin(), before.end(), after.begin(), after.end());
  TORCH_CHECK_VALUE(was == before.end() && is == after.end(), "compile: expected the pass ",
                    pass.name, " to leave inputs and outputs of the graph as they are, ", "but `",
                    was == before.end() ? "nothing" : *was, "` became `",
                    is == after.end() ? "nothing" : *is,
                    "`; correct the pass, or name it in disabled_passes");
}

/// Runs the pass and verifies what it made of the graph; errors of both name it.
void apply(const Pass& pass, Graph& graph) {
  const auto before = seen_from_outside(graph);
  try {
    pass.run(graph);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "compile: the pass ", pass.name,
                " failed: ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "compile: the pass ", pass.name, " failed: ", error.what());
  }
  try {
    verify(graph, pass.name);
  } catch (c10::Error& error) {
    error.add_context("correct the pass " + pass.name + ", or name it in disabled_passes");
    throw;
  }
  check_seen(pass, before, graph);
}

/// Names of passes that a list may speak of: its own and ours.
std::vector<std::string> known_names(const std::vector<Pass>& passes) {
  auto known = pass_names();
  for (const Pass& pass : passes) {
    if (std::find(known.begin(), known.end(), pass.name) == known.end()) known.push_back(pass.name);
  }
  return known;
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
  counters()["ddp_buckets"] = 0;
  if (!options.dump_folder.empty()) dump(graph, options.dump_folder, 0, "captured");
  int64_t ran = 0;
  for (size_t i = 0; i < passes.size(); ++i) {
    if (is_disabled(passes[i])) continue;
    apply(passes[i], graph);
    ++ran;
    if (!options.dump_folder.empty()) dump(graph, options.dump_folder, i + 1, passes[i].name);
  }
  counters()["passes"] = ran;
}

void check_functions(const std::vector<Pass>& passes) {
  for (const Pass& pass : passes)
    TORCH_CHECK_VALUE(pass.run, "compile: expected a function in Pass::run of the pass '",
                      pass.name, "', got an empty one; give it a function that takes a Graph&");
}

void check_disabled(const std::vector<Pass>& passes, const std::vector<std::string>& disabled) {
  const auto known = known_names(passes);
  for (const std::string& name : disabled) {
    TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(),
                      "compile: expected names of passes to disable, got '", name,
                      "'; nearest names: ", format_list(nearest_names(name, known)));
  }
}

void check_order(const std::vector<Pass>& passes) {
  const auto known = known_names(passes);
  for (const Pass& pass : passes) {
    for (const auto& name : pass.after)
      TORCH_CHECK_VALUE(std::find(known.begin(), known.end(), name) != known.end(),
                        "compile: expected names of passes in Pass::after of the pass '", pass.name,
                        "', got '", name,
                        "'; nearest names: ", format_list(nearest_names(name, known)));
  }
  for (size_t i = 0; i < passes.size(); ++i) {
    for (const auto& name : passes[i].needs) {
      const bool is_done = std::any_of(
          passes.begin(), passes.begin() + static_cast<long>(i),
          [&](const Pass& earlier) { return our_name(earlier.name) == our_name(name); });
      TORCH_CHECK_VALUE(is_done, "compile: expected the pass ", name, " before ", passes[i].name,
                        ", which can't be without it, got a list that has it not; add it");
    }
    for (size_t later = i + 1; later < passes.size(); ++later) {
      TORCH_CHECK_VALUE(!passes[i].once || our_name(passes[later].name) != our_name(passes[i].name),
                        "compile: expected the pass ", passes[i].name,
                        " once at most, got it twice; leave one out");
      for (const auto& name : passes[i].after)
        TORCH_CHECK_VALUE(our_name(name) != our_name(passes[later].name),
                          "compile: expected the pass ", passes[later].name, " before ",
                          passes[i].name,
                          ", which needs it done, got it after; change their order");
    }
  }
}

std::vector<std::string> pass_names() {
  std::vector<std::string> names;
  for (const Entry& each : all_passes()) names.emplace_back(each.name);
  for (const Alias& each : kAliases) names.emplace_back(each.upstream);
  return names;
}

Pass find_pass(const std::string& name, std::optional<int64_t> bucket_bytes) {
  TORCH_CHECK_VALUE(!bucket_bytes || *bucket_bytes > 0,
                    "compile: expected a bucket size of at least 1 byte, got ",
                    bucket_bytes.value_or(0));
  const std::string ours = our_name(name);
  for (const Entry& each : all_passes()) {
    if (ours != each.name) continue;
    if (const auto* run = std::get_if<Function>(&each.run))
      return {ours, *run, each.after, each.needs, each.once};
    Caps caps;
    if (bucket_bytes) caps = BucketCaps{.first = *bucket_bytes, .later = *bucket_bytes};
    const auto run = std::get<BucketFunction>(each.run);
    return {ours, [run, caps](Graph& graph) { run(graph, caps); }, each.after, each.needs,
            each.once};
  }
  TORCH_CHECK_VALUE(false, "compile: expected the name of a pass, got '", name,
                    "'; nearest names: ", format_list(nearest_names(name, pass_names())));
}

}  // namespace tessera::compiler
