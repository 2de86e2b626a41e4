#include <tessera/compile/config.h>

#include "compiler/passes/run.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera {
namespace {

thread_local CompileConfig current;

void check_mode(const std::string& mode) {
  static const std::vector<std::string> modes = {"python_reducer", "ddp_optimizer",
                                                 "python_reducer_without_compiled_forward",
                                                 "no_optimization"};
  TORCH_CHECK_VALUE(std::find(modes.begin(), modes.end(), mode) != modes.end(),
                    "ConfigPatch: expected optimize_ddp to be one of python_reducer, "
                    "ddp_optimizer, python_reducer_without_compiled_forward, no_optimization, "
                    "got '",
                    mode, "'");
}

}  // namespace

const CompileConfig& compile_config() { return current; }

ConfigPatch::ConfigPatch(const Changes& changes) : before_(current) {
  if (changes.fuse_ddp_passes) {
    std::vector<Pass> passes;
    for (const auto& name : *changes.fuse_ddp_passes) passes.push_back(compiler::find_pass(name));
    compiler::check_order(passes);
  }
  if (changes.optimize_ddp) check_mode(*changes.optimize_ddp);
  TORCH_CHECK_VALUE(changes.bucket_bytes.value_or(1) > 0,
                    "ConfigPatch: expected bucket_bytes above 0, got ",
                    changes.bucket_bytes.value_or(1));
  if (changes.fuse_ddp_passes) current.fuse_ddp_passes = *changes.fuse_ddp_passes;
  if (changes.reorder_for_locality) current.reorder_for_locality = *changes.reorder_for_locality;
  if (changes.optimize_ddp) current.optimize_ddp = *changes.optimize_ddp;
  if (changes.bucket_bytes) current.bucket_bytes = *changes.bucket_bytes;
  if (changes.capture_collectives) current.capture_collectives = *changes.capture_collectives;
  if (changes.fallback_random) current.fallback_random = *changes.fallback_random;
}

ConfigPatch::~ConfigPatch() { current = before_; }

}  // namespace tessera
