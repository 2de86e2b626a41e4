#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

/// How clients of a UnixStore and its server talk: frames of a length and a message.
namespace tessera::comm {

enum class StoreCode : uint8_t {
  // What a client asks; words and answer in brackets.
  Set,         // [key, value, ...]
  CompareSet,  // [key, expected, desired] -> [value]
  Get,         // [key, ...] -> [value, ...] or Absent
  Add,         // number, [key] -> number
  Delete,      // [key] -> 0 or 1
  Check,       // [key, ...] -> 0 or 1
  Count,       // -> number
  List,        // -> [key, ...]
  Wait,        // milliseconds, [key, ...] -> Done or TimedOut
  Append,      // [key, value]
  Push,        // [key, value]
  Pop,         // [key] -> [value] or Absent
  Length,      // [key] -> number
  // What the server answers.
  Done,
  Absent,
  TimedOut,
  Refused,  // [reason]
};

struct StoreMessage {
  StoreCode code = StoreCode::Done;
  int64_t number = 0;
  std::vector<std::string> words = {};
};

/// Longer ones are refused before memory is made for them.
inline constexpr size_t kLargestStoreMessage = size_t{64} << 20;
inline constexpr size_t kFrameHeader = sizeof(uint32_t);

/// As c10d has values, and as strings.
inline std::string to_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}
inline std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

/// The frame of a message; none if it would be too long.
std::optional<std::string> encode(const StoreMessage& message);
/// Bytes of the message after the frame's header, which `bytes` begins with; none if no such
/// message is allowed.
std::optional<size_t> message_bytes(std::string_view bytes);
/// The message of a frame without its header; none if it is none.
std::optional<StoreMessage> decode(std::string_view bytes);

}  // namespace tessera::comm
