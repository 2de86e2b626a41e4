#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace tessera::train {

/// Writes a TensorBoard event file into a folder, which it makes if need be. Every writer has a
/// file of its own, so a resumed job adds to what TensorBoard shows. One thread at a time. Throws
/// std::runtime_error when the file cannot be written.
class EventWriter {
 public:
  explicit EventWriter(const std::filesystem::path& folder);

  /// One point of the curve `tag`. `wall_time`: seconds since 1970.
  void scalar(const std::string& tag, double value, std::int64_t step, double wall_time);

  /// Text under `tag`, which TensorBoard shows as Markdown.
  void text(const std::string& tag, const std::string& text, std::int64_t step);

  /// Hands what was written to the system, where a running TensorBoard sees it.
  void flush();

  const std::filesystem::path& file() const { return file_; }

 private:
  void write_event(const std::string& event);
  void check() const;

  std::filesystem::path file_;
  std::ofstream stream_;
};

/// One record as event files hold them: length, checksum of the length, bytes, checksum of the
/// bytes.
std::string framed_record(std::string_view bytes);

}  // namespace tessera::train
