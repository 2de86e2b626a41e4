#pragma once

#include <tessera/trace.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

/// Records where the time of some steps goes on every rank, with operators if asked for.
class Timeline {
 public:
  explicit Timeline(bool with_operators);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  /// The spans of all ranks in Chrome's trace format, on rank 0; every rank calls it, once.
  std::string gather();

 private:
  class Operators;
  std::unique_ptr<Operators> operators_;
  SpanRecorder recorder_;
};

}  // namespace tessera::train
