#pragma once

#include "launcher/sink.h"

#include <poll.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::launcher {

/// Where everything the ranks and the launcher say goes. Lines are kept whole on each sink; stdout
/// and stderr share one sink when they are the same file, or their lines would cut each other.
class Output {
 public:
  Output();

  Sink& out() { return *out_; }
  Sink& err() { return *err_; }

  /// Queues "tessera run: <message>\n" on stderr.
  void say(std::string_view message);

  /// Adds the sinks that wait for their reader to a poll set.
  void add_pending(std::vector<pollfd>& fds) const;

  void write_some();
  bool has_pending() const { return out_->has_pending() || err_->has_pending(); }
  bool is_broken() const { return out_->is_broken() || err_->is_broken(); }

 private:
  std::shared_ptr<Sink> out_;
  std::shared_ptr<Sink> err_;
};

}  // namespace tessera::launcher
