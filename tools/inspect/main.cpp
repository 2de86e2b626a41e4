// `tessera inspect`: what lies in a safetensors file, a checkpoint or a run.
#include "inspect/listing.h"
#include "inspect/subjects.h"

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <iostream>

int main(int argc, char** argv) {
  CLI::App app(
      "Lists tensors, dtypes, shapes, sizes, the ranks that hold them and checksums of a "
      "safetensors file, a checkpoint, or a run and its latest checkpoint",
      "tessera inspect");
  std::string path;
  bool verifies = false;
  bool as_json = false;
  app.add_option("path", path, "A file, a checkpoint's folder, or a run's")->required();
  app.add_flag("--verify", verifies, "Reread every byte and compare checksums");
  app.add_flag("--json", as_json, "For programs");
  CLI11_PARSE(app, argc, argv);
  try {
    const auto subject = tessera::inspect::find_subject(path);
    if (verifies) tessera::inspect::verify_subject(subject);
    std::cout << (as_json ? to_json(subject) : to_table(subject));
    if (verifies && !as_json && subject.index) {
      std::cout << (subject.kind == tessera::inspect::Subject::Kind::File
                        ? "\nread in full; plain files have no checksums\n"
                        : "\nverified: every byte has its checksum\n");
    }
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "tessera inspect: " << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << "tessera inspect: " << error.what() << "\n";
  }
  return 1;
}
