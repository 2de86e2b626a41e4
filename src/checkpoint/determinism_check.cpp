#include "checkpoint/determinism_check.h"

#include <ATen/core/ivalue.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>

#include <sstream>

namespace tessera::detail::checkpoint {
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

SavedDescription SavedDescription::of(const at::Tensor& tensor, std::string saved_by) {
  const auto& node = tensor.grad_fn();
  return {tensor.is_nested() ? std::vector<int64_t>() : tensor.sizes().vec(), tensor.scalar_type(),
          tensor.device(), node ? &typeid(*node) : nullptr, std::move(saved_by)};
}

bool SavedDescription::matches(const SavedDescription& other) const {
  return sizes == other.sizes && dtype == other.dtype && device == other.device;
}

std::string SavedDescription::text() const {
  std::ostringstream text;
  text << at::IntArrayRef(sizes) << ' ' << dtype << " on " << device;
  if (!saved_by.empty()) text << ", saved by " << saved_by;
  if (made_by) {
    const auto name = c10::demangle(made_by->name());
    text << ", made by " << name.substr(name.rfind(':') + 1);
  }
  return text.str();
}

std::string describe_differences(const std::vector<SavedDescription>& saved,
                                 const std::vector<SavedDescription>& recomputed) {
  constexpr int kMost = 5;
  std::string text;
  int different = 0;
  for (size_t i = 0; i < std::min(saved.size(), recomputed.size()); ++i) {
    if (saved[i].matches(recomputed[i]) || ++different > kMost) continue;
    text += "\n  tensor " + std::to_string(i) + " of " + std::to_string(saved.size()) +
            ": the forward saved " + saved[i].text() + "; the recomputation " +
            recomputed[i].text();
  }
  if (different > kMost) text += "\n  and " + std::to_string(different - kMost) + " more";
  return text;
}

}  // namespace tessera::detail::checkpoint
