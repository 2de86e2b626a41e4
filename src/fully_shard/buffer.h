#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::sharded {

/// Memory that can be freed and filled again under the same storage: views of it that autograd
/// saved come back to life with it. A read while it is free is an error that says why; before
/// libtorch 2.12 it is one of an empty storage, or an access to address 0.
class Buffer {
 public:
  /// Free at first.
  Buffer(size_t bytes, c10::Device device);

  size_t bytes() const { return bytes_; }
  /// Memory for the bytes, of any values.
  void fill();
  /// On a device, whoever gets the memory next waits for what is queued by now on the current
  /// stream, and on those of keep_for_current_stream().
  void free();
  void keep_for_current_stream() const;
  /// A tensor in it.
  at::Tensor view(size_t offset, c10::IntArrayRef sizes, at::ScalarType dtype) const;

 private:
  size_t bytes_;
  c10::Device device_;
  c10::Storage storage_;
  bool is_filled_ = false;
};

/// Where tensors lie in one piece of memory, one after the other, each at the start of a cache
/// line.
class Places {
 public:
  /// Offset of one more tensor.
  size_t add(size_t bytes);
  size_t total() const { return total_; }

 private:
  size_t total_ = 0;
};

}  // namespace tessera::sharded
