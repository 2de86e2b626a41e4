#pragma once

#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace tessera::launcher {

/// Owns one file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

/// The result of a system call, or std::system_error that begins with `action` if the call failed.
inline int checked(int result, const char* action) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), action);
  return result;
}

}  // namespace tessera::launcher
