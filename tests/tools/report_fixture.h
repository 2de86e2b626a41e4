#pragma once

#include <filesystem>
#include <string>

namespace tessera::test {

struct RunFixture {
  int steps = 400;
  int ranks = 2;
  std::string parallel = "replicate";
  double final_loss = 1.9;
  bool is_compiled = false;  // with program.cpp
  bool has_timeline = true;
  bool has_named_waits = true;  // false: the timeline has collectives alone
  int resumed_at = 0;           // 0: never; else the 30 steps after it are written twice
};

/// Writes a run folder as a trainer does, with noise of a fixed seed.
void write_run(const std::filesystem::path& folder, const RunFixture& run);

void write_text(const std::filesystem::path& file, const std::string& text);
std::string read_text(const std::filesystem::path& file);

}  // namespace tessera::test
