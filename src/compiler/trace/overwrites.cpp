#include "compiler/trace/overwrites.h"

#include <algorithm>
#include <string_view>

namespace tessera::compiler {
namespace {

constexpr std::string_view kFills[] = {
    "aten::copy_",      "aten::fill_",      "aten::zero_",       "aten::normal_",
    "aten::uniform_",   "aten::bernoulli_", "aten::random_",     "aten::exponential_",
    "aten::geometric_", "aten::cauchy_",    "aten::log_normal_",
};

}  // namespace

bool overwrites(const c10::FunctionSchema& schema, size_t argument) {
  if (schema.arguments()[argument].kwarg_only()) return true;  // out=
  return argument == 0 &&
         std::find(std::begin(kFills), std::end(kFills), schema.name()) != std::end(kFills);
}

}  // namespace tessera::compiler
