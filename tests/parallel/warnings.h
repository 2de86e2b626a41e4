#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <vector>

namespace tessera::testing {

/// Catches the warnings of this thread while it lives.
class CaughtWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  /// One line each.
  std::string text() const {
    std::string lines;
    for (const auto& each : texts) lines += each + "\n";
    return lines;
  }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

}  // namespace tessera::testing
