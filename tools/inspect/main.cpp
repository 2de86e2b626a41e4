// `tessera inspect`: what lies in a safetensors file, a checkpoint or a run.
#include "base/text.h"
#include "inspect/listing.h"
#include "inspect/subjects.h"

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <iostream>

namespace {

using tessera::inspect::Subject;

constexpr int kFailure = 1;
constexpr int kUsageError = 2;

int usage_error(const CLI::ParseError& error) {
  const bool lacks_path = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  std::cerr << "tessera inspect: "
            << (lacks_path ? "expected the path of a file, a checkpoint or a run" : error.what())
            << "; see tessera inspect --help\n";
  return kUsageError;
}

/// Prints it; the program's exit code.
int show(const Subject& subject, bool as_json, bool is_verified) {
  std::cout << (as_json ? to_json(subject) : to_table(subject));
  if (!subject.index && !subject.checkpoints.empty()) {
    std::cerr << "tessera inspect: " << tessera::printable(subject.path.string())
              << ": expected a whole checkpoint, got " << subject.checkpoints.size()
              << " that can't be loaded\n";
    return kFailure;
  }
  if (is_verified && !as_json && subject.index) {
    std::cout << (subject.kind == Subject::Kind::File
                      ? "\nread in full; of plain files those of torch.save have checksums\n"
                      : "\nverified: every byte has its checksum\n");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Lists tensors, dtypes, shapes, sizes, the ranks that hold them and checksums of a "
      "safetensors or torch.save file, a checkpoint, or a run or folder of checkpoints and the "
      "latest of them",
      "tessera inspect");
  std::string path;
  bool verifies = false;
  bool as_json = false;
  app.add_option("path", path, "A file, a checkpoint's folder, a run's, or one of checkpoints")
      ->required();
  app.add_flag("--verify", verifies, "Reread every byte and compare checksums");
  app.add_flag("--json", as_json, "For programs");
  try {
    app.parse(argc, argv);
    const auto subject = tessera::inspect::find_subject(path);
    if (verifies) tessera::inspect::verify_subject(subject);
    return show(subject, as_json, verifies);
  } catch (const CLI::ParseError& error) {
    return error.get_exit_code() == 0 ? app.exit(error) : usage_error(error);
  } catch (const c10::Error& error) {
    std::cerr << "tessera inspect: " << tessera::printable(error.what_without_backtrace()) << "\n";
  } catch (const std::exception& error) {
    std::cerr << "tessera inspect: " << tessera::printable(error.what()) << "\n";
  }
  return kFailure;
}
