#pragma once

#include "base/capture.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

/// The dispatch key through which every operator, under autograd, comes to the recorder.
namespace tessera::compiler {

using capture::kRecordKey;

/// Puts the recorder behind every operator; once. Throws if something else in the process has
/// taken the key.
void ensure_registered();

/// Operators of this thread go to the current Recorder, while it lives.
class RecordScope {
 public:
  RecordScope();
  ~RecordScope();
  RecordScope(const RecordScope&) = delete;
  RecordScope& operator=(const RecordScope&) = delete;

 private:
  c10::impl::LocalDispatchKeySet before_;
};

/// Operators run unrecorded, below autograd and autocast, while it lives.
class RunScope {
 public:
  RunScope();
  ~RunScope();
  RunScope(const RunScope&) = delete;
  RunScope& operator=(const RunScope&) = delete;

 private:
  c10::impl::LocalDispatchKeySet before_;
};

}  // namespace tessera::compiler
