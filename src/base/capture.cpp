#include "base/capture.h"

#include <utility>

namespace tessera::capture {
namespace {

thread_local Observer* current = nullptr;

}  // namespace

Observer* observer() { return current; }

ObserverScope::ObserverScope(Observer* observer) : before_(std::exchange(current, observer)) {}
ObserverScope::~ObserverScope() { current = before_; }

}  // namespace tessera::capture
