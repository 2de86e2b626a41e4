// TensorBoard event files: their framing, and what TensorBoard itself reads from them.

#include "base/crc32c.h"
#include "support/temporary_folder.h"
#include "tools/shell_output.h"
#include "train/events/event_writer.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

std::string bytes_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

/// The payloads of a file's records; checks every checksum.
std::vector<std::string> records_of(const std::string& bytes) {
  std::vector<std::string> records;
  std::size_t at = 0;
  while (at < bytes.size()) {
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data() + at, sizeof length);
    records.push_back(bytes.substr(at + 12, length));
    EXPECT_EQ(framed_record(records.back()), bytes.substr(at, length + 16));
    at += length + 16;
  }
  return records;
}

TEST(Events, RecordsHaveLengthAndTwoMaskedChecksums) {
  const std::string record = framed_record("tessera");
  ASSERT_EQ(record.size(), 8 + 4 + 7 + 4);
  EXPECT_EQ(record.substr(0, 8), std::string("\7\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(record.substr(12, 7), "tessera");
  std::uint32_t checksum = 0;
  std::memcpy(&checksum, record.data() + 19, 4);
  const std::uint32_t rotated = checksum - 0xa282ead8u;
  EXPECT_EQ((rotated >> 17) | (rotated << 15), crc32c("tessera", 7));
}

TEST(Events, FilesBeginWithTheirVersionAndHoldWhatWasFlushed) {
  const testing::TemporaryFolder folder;
  EventWriter writer(folder.path() / "deep" / "events");
  EXPECT_TRUE(writer.file().filename().string().starts_with("events.out.tfevents."));
  writer.scalar("loss", 1.5, 300, 1000.25);
  writer.flush();
  const auto records = records_of(bytes_of(writer.file()));
  ASSERT_EQ(records.size(), 2);
  EXPECT_TRUE(
      records[0].ends_with("\x1a\x0d"
                           "brain.Event:2"));
  // wall_time 1000.25, step 300 as a varint, summary { value { tag, simple_value 1.5 } }
  EXPECT_EQ(
      records[1],
      std::string(
          "\x09\0\0\0\0\0\x42\x8f\x40\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\0\0\xc0\x3f",
          27));
}

TEST(Events, WritersOfOneFolderHaveFilesOfTheirOwn) {
  const testing::TemporaryFolder folder;
  const EventWriter first(folder.path());
  const EventWriter second(folder.path());
  EXPECT_NE(first.file(), second.file());
}

TEST(Events, TellWhenTheyCannotBeWritten) {
  const testing::TemporaryFolder folder;
  std::ofstream(folder.path() / "file") << "x";
  try {
    const EventWriter writer(folder.path() / "file" / "events");
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(std::string(error.what()).find("EventWriter: expected to write "), 0) << error.what();
  }
}

std::string python() {
  if (const char* named = std::getenv("TESSERA_PYTHON")) return named;
  return TESSERA_SOURCE_DIR "/.venv/bin/python";
}

TEST(Events, AreReadByTensorBoard) {
  const auto found = test::run_shell(test::quoted(python()) + " -c 'import tensorboard' 2>&1");
  if (found.exit_code != 0) GTEST_SKIP() << "no tensorboard in " << python() << ": " << found.text;
  const testing::TemporaryFolder folder;
  {
    EventWriter writer(folder.path());
    for (int step = 1; step <= 500; ++step) {
      writer.scalar("loss", 5.0 / step, step, 1.7e9 + step);
      writer.scalar("lr", 1e-3 * step, step, 1.7e9 + step);
    }
    writer.scalar("huge step", -2.5, std::int64_t{1} << 40, 1.7e9);
    writer.text("config", "**ranks** 2 \xc3\xa9", 0);
  }
  const std::string script = R"(
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
def values(tag):
    if tag in events.Tags()["scalars"]:
        return [[e.step, e.wall_time, e.value] for e in events.Scalars(tag)]
    return [[e.step, e.wall_time, e.tensor_proto.float_val[0]] for e in events.Tensors(tag)]
text = events.Tensors("config")[0]
print(json.dumps({
    "loss": values("loss"), "lr": len(values("lr")), "huge": values("huge step"),
    "text": text.tensor_proto.string_val[0].decode(), "text_step": text.step,
    "plugin": events.SummaryMetadata("config").plugin_data.plugin_name}))
)";
  const auto output = test::run_shell(test::quoted(python()) + " -c " + test::quoted(script) + " " +
                                      test::quoted(folder.path().string()) + " 2>/dev/null");
  ASSERT_EQ(output.exit_code, 0);
  const auto read = nlohmann::json::parse(output.text);
  ASSERT_EQ(read["loss"].size(), 500);
  EXPECT_EQ(read["loss"][499][0], 500);
  EXPECT_EQ(read["loss"][499][1], 1.7e9 + 500);
  EXPECT_FLOAT_EQ(read["loss"][499][2].get<float>(), 0.01F);
  EXPECT_EQ(read["lr"], 500);
  EXPECT_EQ(read["huge"][0][0], std::int64_t{1} << 40);
  EXPECT_EQ(read["text"], "**ranks** 2 \xc3\xa9");
  EXPECT_EQ(read["plugin"], "text");
}

}  // namespace
}  // namespace tessera::train
