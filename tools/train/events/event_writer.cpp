#include "train/events/event_writer.h"

#include "base/crc32c.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::train {

template <class Integer>
void append_little_endian(std::string& bytes, Integer value) {
  for (std::size_t at = 0; at < sizeof(Integer); ++at)
    bytes += static_cast<char>((value >> (8 * at)) & 0xff);
}

/// A protobuf message, field by field; a message within a message is a field of bytes.
class Message {
 public:
  void integer(int field, std::uint64_t value) {
    varint(key(field, 0));
    varint(value);
  }
  void number(int field, double value) {
    varint(key(field, 1));
    append_little_endian(data_, std::bit_cast<std::uint64_t>(value));
  }
  void bytes(int field, std::string_view value) {
    varint(key(field, 2));
    varint(value.size());
    data_ += value;
  }
  void number(int field, float value) {
    varint(key(field, 5));
    append_little_endian(data_, std::bit_cast<std::uint32_t>(value));
  }

  const std::string& data() const { return data_; }

 private:
  /// The number of a field and how its value is written.
  static std::uint64_t key(int field, int wire_type) {
    return (static_cast<std::uint64_t>(field) << 3) | static_cast<std::uint64_t>(wire_type);
  }
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) data_ += static_cast<char>((value & 0x7f) | 0x80);
    data_ += static_cast<char>(value);
  }

  std::string data_;
};

namespace {

// Fields of TensorFlow's event.proto, summary.proto and tensor.proto.
constexpr int kEventWallTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5;
constexpr int kSummaryValue = 1;
constexpr int kValueTag = 1, kValueSimple = 2, kValueTensor = 8, kValueMetadata = 9;
constexpr int kMetadataPluginData = 1, kPluginDataName = 1;
constexpr int kTensorType = 1, kTensorShape = 2, kTensorStringVal = 8;
constexpr int kShapeDim = 2, kDimSize = 1;
constexpr std::uint64_t kTypeString = 7;

double event_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string event_host() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "localhost";
}

/// TensorBoard reads a folder's files by name, which begins with the time for that reason.
std::filesystem::path event_file_name() {
  static std::atomic<int> files = 0;
  return "events.out.tfevents." + std::to_string(static_cast<std::int64_t>(event_time())) + "." +
         event_host() + "." + std::to_string(::getpid()) + "." + std::to_string(files++);
}

std::string event_bytes(std::int64_t step, double wall_time, const std::string& value) {
  Message summary;
  summary.bytes(kSummaryValue, value);
  Message event;
  event.number(kEventWallTime, wall_time);
  event.integer(kEventStep, static_cast<std::uint64_t>(step));
  event.bytes(kEventSummary, summary.data());
  return event.data();
}

/// A checksum of bytes that hold a checksum is weak; the format rotates it and adds a constant.
std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes.data(), bytes.size());
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

}  // namespace

std::string framed_record(std::string_view bytes) {
  std::string record;
  append_little_endian(record, static_cast<std::uint64_t>(bytes.size()));
  append_little_endian(record, masked_crc(record));
  record += bytes;
  append_little_endian(record, masked_crc(bytes));
  return record;
}

EventWriter::EventWriter(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  file_ = folder / event_file_name();
  stream_.open(file_, std::ios::binary);
  Message event;
  event.number(kEventWallTime, event_time());
  event.bytes(kEventFileVersion, "brain.Event:2");
  write_event(event.data());
  flush();
}

void EventWriter::scalar(const std::string& tag, double value, std::int64_t step,
                         double wall_time) {
  Message point;
  point.bytes(kValueTag, tag);
  point.number(kValueSimple, static_cast<float>(value));
  write_event(event_bytes(step, wall_time, point.data()));
}

void EventWriter::text(const std::string& tag, const std::string& text, std::int64_t step) {
  Message dim, shape, tensor, plugin, metadata, point;
  dim.integer(kDimSize, 1);
  shape.bytes(kShapeDim, dim.data());
  tensor.integer(kTensorType, kTypeString);
  tensor.bytes(kTensorShape, shape.data());
  tensor.bytes(kTensorStringVal, text);
  plugin.bytes(kPluginDataName, "text");
  metadata.bytes(kMetadataPluginData, plugin.data());
  point.bytes(kValueTag, tag);
  point.bytes(kValueTensor, tensor.data());
  point.bytes(kValueMetadata, metadata.data());
  write_event(event_bytes(step, event_time(), point.data()));
}

void EventWriter::flush() {
  stream_.flush();
  check();
}

void EventWriter::write_event(const std::string& event) {
  const std::string record = framed_record(event);
  stream_.write(record.data(), static_cast<std::streamsize>(record.size()));
  check();
}

void EventWriter::check() const {
  if (stream_.good()) return;
  throw std::runtime_error("EventWriter: expected to write " + file_.string() +
                           ", but could not; check that the folder may be written and has room");
}

}  // namespace tessera::train
