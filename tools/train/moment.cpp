#include "train/moment.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

namespace tessera::train {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Moment::Moment(c10::Device device) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl devices(device.type());
    event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // one that tells the time
    event_->record(devices.getStream(device));
  }
  made_at_ = now();
}

bool Moment::has_come() const { return !event_ || event_->query(); }

void Moment::wait() const {
  if (event_) event_->synchronize();
}

double Moment::seconds_since(const Moment& earlier) const {
  constexpr double kMilliseconds = 1e3;
  return event_ ? earlier.event_->elapsedTime(*event_) / kMilliseconds
                : made_at_ - earlier.made_at_;
}

}  // namespace tessera::train
