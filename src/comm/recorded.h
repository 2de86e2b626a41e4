#pragma once

#include <string>

namespace tessera::comm {

/// A backend that remembers its last collectives.
class Recorded {
 public:
  virtual ~Recorded() = default;
  /// One line each, with a heading that names rank and group.
  virtual std::string recent() const = 0;
};

}  // namespace tessera::comm
