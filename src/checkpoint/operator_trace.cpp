#include "checkpoint/operator_trace.h"

#include <ATen/core/ivalue.h>

#include <sstream>

namespace tessera::recompute {
namespace {

thread_local OperatorTrace* current_trace = nullptr;

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  if (current_trace) current_trace->started(function);
  return nullptr;
}

void on_end(const at::RecordFunction& /*function*/, at::ObserverContext* /*context*/) {
  if (current_trace) current_trace->ended();
}

}  // namespace

OperatorTrace::Scope::Scope(OperatorTrace* trace)
    : active_(trace != nullptr), outer_(current_trace) {
  if (!active_) return;
  current_trace = trace;
  // An outer scope's callback serves this one as well.
  if (!outer_) {
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
}

OperatorTrace::Scope::~Scope() {
  if (!active_) return;
  current_trace = outer_;
  if (!outer_) at::removeCallback(handle_);
}

void OperatorTrace::clear() {
  calls_.clear();
  running_.clear();
}

std::string OperatorTrace::current() const { return running_.empty() ? "" : running_.back(); }

std::string OperatorTrace::text() const {
  std::string text;
  for (const auto& call : calls_) text += "\n  " + std::string(2 * call.depth, ' ') + call.text;
  return text.empty() ? "\n  none" : text;
}

void OperatorTrace::started(const at::RecordFunction& function) {
  std::ostringstream line;
  line << function.name() << '(';
  const char* separator = "";
  for (const auto& input : function.inputs()) {
    if (!input.isTensor() || !input.toTensor().defined() || input.toTensor().is_nested()) continue;
    line << separator << input.toTensor().sizes();
    separator = ", ";
  }
  line << ')';
  calls_.push_back({line.str(), running_.size()});
  running_.emplace_back(function.name());
}

void OperatorTrace::ended() {
  if (!running_.empty()) running_.pop_back();
}

}  // namespace tessera::recompute
