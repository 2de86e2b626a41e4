#pragma once

#include <c10/core/Device.h>

#include <string>

namespace tessera::train {

/// Of the generator that operators on this device draw from.
std::string random_state(c10::Device device);
void set_random_state(c10::Device device, const std::string& state);

/// Random numbers drawn on the host or on `device` in its scope are drawn again after it.
class KeptRandomState {
 public:
  explicit KeptRandomState(c10::Device device);
  ~KeptRandomState();
  KeptRandomState(const KeptRandomState&) = delete;
  KeptRandomState& operator=(const KeptRandomState&) = delete;

 private:
  c10::Device device_;
  std::string of_host_, of_device_;
};

}  // namespace tessera::train
