#include "compiler/recheck.h"

#include "compiler/ir/operators.h"
#include "compiler/ir/text.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>

namespace tessera::compiler {
namespace {

std::string name_of(const Node& node) {
  return node.op + (node.module.empty() ? "" : " in " + node.module);
}

/// The arguments of one operator, in two recordings; empty if they are the same.
std::string changed_argument(const Node& before, const Node& after) {
  const auto op = find_operator(before.op);
  if (!op) return {};
  const auto& declared = op->schema().arguments();
  for (size_t i = 0; i < before.arguments.size(); ++i) {
    const auto& was = before.arguments[i];
    const auto& is = after.arguments[i];
    const auto what = c10::str("argument '", declared[i].name(), "' of ", name_of(before));
    if (was.kind != is.kind || was.values != is.values) return what + " is another tensor";
    if (was.kind != Argument::Kind::Constant) continue;
    const auto& type = *declared[i].type();
    const auto from = text_of_constant(was.constant, type),
               to = text_of_constant(is.constant, type);
    if (from != to) return c10::str(what, " was ", from, " and is ", to);
  }
  return {};
}

}  // namespace

int64_t Recheck::interval(double recorded_seconds) const {
  constexpr double kMost = 1 << 30;
  const double per_run = runs_ > 0 ? seconds_ / static_cast<double>(runs_) : 0;
  const double wanted = per_run > 0 ? std::ceil(100 * recorded_seconds / per_run) : 0;
  return std::max(kSteady, static_cast<int64_t>(std::min(wanted, kMost)));
}

void Recheck::pass(int64_t interval) {
  ++calls_;
  next_ = calls_ < kSteady ? std::min(2 * calls_, kSteady) : calls_ + interval;
  seconds_ = 0;
  runs_ = 0;
}

std::string change(const Recording& program, const Recording& function) {
  if (auto found = different_inputs(program, function); !found.empty()) return found;
  const auto& before = program.graph.nodes;
  const auto& after = function.graph.nodes;
  for (size_t i = 0; i < std::max(before.size(), after.size()); ++i) {
    if (i >= after.size()) return name_of(before[i]) + " is not called any more";
    if (i >= before.size()) return name_of(after[i]) + " is called besides";
    if (before[i].op != after[i].op)
      return c10::str(name_of(before[i]), " became ", name_of(after[i]));
    if (auto found = changed_argument(before[i], after[i]); !found.empty()) return found;
  }
  return difference(program.graph, function.graph);
}

}  // namespace tessera::compiler
