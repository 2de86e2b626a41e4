#include "train/compile_choice.h"

namespace tessera::train {
namespace {

// Note [compiled by default]
// Measured on one GPU, a compiled step takes 0.78 to 0.85 of the time of an eager one (GPT of 12
// blocks), and an eighth of it where launches are what takes time (GPT of 6 blocks): rows `compile`
// of benchmarks/results/*-train-cuda-compile-gpt*-1rank.csv. On a CPU the intervals of a GPT's rows
// have 1 in them. Programs that communicate are not replayed as CUDA graphs, and no row tells of
// them. Whatever else is not both measured and tested on a device stays eager, too.

/// Compiling takes seconds, of which a step saves some milliseconds.
constexpr int64_t kFewestSteps = 500;

std::string why_eager(const Settings& settings, int world_size) {
  if (settings.device != "cuda") return "steps of a GPT are not measured to be faster so on a CPU";
  if (world_size > 1) return "steps of several ranks are not measured to be faster so on GPUs";
  if (settings.precision == "fp16") return "with fp16 the host reads values of each step";
  if (settings.steps < kFewestSteps)
    return "compiling takes longer than fewer than " + std::to_string(kFewestSteps) + " steps save";
  const std::pair<bool, const char*> untested[] = {
      {settings.dropout > 0, "--dropout"},
      {settings.accumulate > 1, "--accumulate"},
      {settings.checkpoint_activations != "none", "--checkpoint-activations"},
  };
  for (const auto& [is_given, flag] : untested) {
    if (is_given) return std::string("with ") + flag + " it is not measured on a GPU";
  }
  return "";
}

}  // namespace

CompileChoice choose_compile(const Settings& settings, int world_size) {
  if (settings.compile) return {.is_on = *settings.compile};
  auto why_not = why_eager(settings, world_size);
  return {.is_on = why_not.empty(), .why_not = std::move(why_not)};
}

}  // namespace tessera::train
