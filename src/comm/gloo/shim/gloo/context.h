#pragma once

// What libtorch's ProcessGroupGloo.hpp needs of gloo, whose code is in libtorch_cpu.so but whose
// headers no wheel has. Declarations only; the symbols are libtorch's. Members that are not named
// here exist: never make, copy or measure objects of these classes, only call what is declared.
// Holds for libtorch 2.11 to 2.15.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  void closeConnections();
};

namespace transport {

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

}  // namespace transport
}  // namespace gloo
