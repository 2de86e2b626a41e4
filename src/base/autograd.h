#pragma once

#include <functional>
#include <vector>

namespace tessera {

/// Whether this thread runs a backward.
bool is_in_backward();

/// Backwards, one inside the other, whose ends somebody waits for. Not for several threads at once.
class BackwardCallbacks {
 public:
  /// When the backward that this thread runs ends, calls `end` with its number; asked again in the
  /// same backward, does nothing. If it fails, or `end` throws, `failed` is called before the
  /// caller of backward() sees the exception; what `failed` throws is lost.
  void expect(std::function<void(int backward)> end, std::function<void(int backward)> failed = {});
  /// Whether it was asked in the backward that this thread runs.
  bool is_expected() const;
  void close(int backward);
  void clear() { numbers_.clear(); }
  bool empty() const { return numbers_.empty(); }

 private:
  std::vector<int> numbers_;
};

}  // namespace tessera
