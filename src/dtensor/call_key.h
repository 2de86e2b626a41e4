#pragma once

#include "dtensor/part.h"

#include <ATen/core/stack.h>

#include <cstdint>
#include <vector>

namespace tessera::dtensor {

/// Everything of a call that can change how it runs on parts, as numbers: for distributed tensors
/// spec, sizes, strides and dtype, for others sizes, dtype and what kind of number they are, for
/// the rest their values. A wrong result is what a key that left something out would give.
class CallKey {
 public:
  void clear() {
    words_.clear();
    is_complete_ = true;
    has_plain_ = false;
  }
  void add(const c10::IValue& value);
  void add(uint64_t word) { words_.push_back(word); }
  /// False: a value of a kind that is not known here; the call must not be remembered.
  bool is_complete() const { return is_complete_; }
  /// Whether a plain tensor of several elements is among the values.
  bool has_plain() const { return has_plain_; }
  size_t hash() const;
  const std::vector<uint64_t>& words() const { return words_; }

 private:
  void add_tensor(const at::Tensor& tensor);
  void add_text(const std::string& text);

  std::vector<uint64_t> words_;
  bool is_complete_ = true;
  bool has_plain_ = false;
};

}  // namespace tessera::dtensor
