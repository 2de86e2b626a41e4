#include <tessera/trace.h>

#include <c10/util/Exception.h>

#include <chrono>
#include <utility>

namespace tessera {
namespace {

thread_local SpanRecorder* recorder = nullptr;
thread_local int64_t communication_nanoseconds = 0;
thread_local bool in_communication = false;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool communicates(SpanKind kind) {
  return kind == SpanKind::Communication || kind == SpanKind::Wait;
}

}  // namespace

const char* name_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::Data:
      return "data";
    case SpanKind::Forward:
      return "forward";
    case SpanKind::Backward:
      return "backward";
    case SpanKind::Optimizer:
      return "optimizer";
    case SpanKind::Communication:
      return "communication";
    case SpanKind::Wait:
      return "wait";
    case SpanKind::Other:
      break;
  }
  return "other";
}

Span::Span(SpanKind kind, const char* name, int64_t detail)
    : record_{.kind = kind, .name = name, .detail = detail, .begin = now(), .end = 0},
      is_counted_(communicates(kind) && !std::exchange(in_communication, true)) {}

Span::~Span() {
  if (!is_counted_ && recorder == nullptr) return;
  record_.end = now();
  if (is_counted_) {
    in_communication = false;
    communication_nanoseconds += record_.end - record_.begin;
  }
  if (recorder != nullptr) recorder->records_.push_back(record_);
}

SpanRecorder::SpanRecorder() {
  TORCH_CHECK(recorder == nullptr,
              "SpanRecorder: expected none on this thread, got a second one; end the first");
  recorder = this;
}

SpanRecorder::~SpanRecorder() { recorder = nullptr; }

std::vector<SpanRecord> SpanRecorder::take() { return std::exchange(records_, {}); }

double communication_seconds() { return static_cast<double>(communication_nanoseconds) * 1e-9; }

}  // namespace tessera
