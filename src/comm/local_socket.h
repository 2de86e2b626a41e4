#pragma once

#include <string>
#include <utility>

/// Sockets of one host with names that no file stands for and that go with their last user.
namespace tessera::comm {

/// Owns a descriptor.
class LocalSocket {
 public:
  LocalSocket() = default;
  explicit LocalSocket(int descriptor) : descriptor_(descriptor) {}
  LocalSocket(LocalSocket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  LocalSocket& operator=(LocalSocket&& other) noexcept;
  ~LocalSocket() { reset(); }

  int get() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }
  void reset();

 private:
  int descriptor_ = -1;
};

inline constexpr size_t kLongestSocketName = 100;

/// Listens under `name`. Not open, with errno, if that can't be.
LocalSocket listen_locally(const std::string& name);
/// A connection to `name` that does not block. Not open, with errno, if there is none:
/// ECONNREFUSED: nobody listens, EAGAIN: too many wait to be accepted.
LocalSocket connect_locally(const std::string& name);
/// Whether `descriptor` is a local socket that listens under `name`.
bool listens_locally(int descriptor, const std::string& name);
/// Whether the process at the other end (of one that listens: who made it so) runs as this user.
bool is_same_user(int descriptor);

}  // namespace tessera::comm
