// `tessera inspect`: what lies in a safetensors file, a checkpoint or a run; a program as a page.
#include "base/text.h"
#include "inspect/checkpoints.h"
#include "inspect/program.h"
#include "report/files.h"

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

void write_program(const std::string& path, const std::string& output, bool as_json) {
  const auto program = tessera::inspect::read_program(path);
  if (as_json) {
    std::cout << to_json(program);
    return;
  }
  std::error_code ignored;
  if (std::filesystem::is_directory(output, ignored))
    throw tessera::report::ReportError("expected a file after -o, got the folder " + output);
  if (std::filesystem::equivalent(output, program.path, ignored))
    throw tessera::report::ReportError("expected a new file after -o, got the program " + output);
  const auto page = to_page(program);
  tessera::report::write_file(output, page);
  std::cout << output << ": " << tessera::printable(program.path.string()) << ", "
            << program.layout.instructions.size() << " instructions, "
            << program.layout.kernels.size() << " kernels, "
            << tessera::report::size_text(page.size()) << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Lists tensors, dtypes, shapes, sizes, the ranks that hold them and checksums of a "
      "safetensors or torch.save file, a checkpoint, or a run or folder of checkpoints and the "
      "latest of them; or writes a compiled program as an HTML page",
      "tessera inspect");
  std::string path;
  std::string output = "program.html";
  bool verifies = false;
  bool as_json = false;
  bool is_program = false;
  app.add_option("path", path, "A file, a checkpoint's folder, a run's, or one of checkpoints")
      ->required();
  auto* verify = app.add_flag("--verify", verifies, "Reread every byte and compare checksums");
  app.add_flag("--json", as_json, "For programs");
  auto* program = app.add_flag("--program", is_program,
                               "Write the compiled program of a run, a dump folder or a file as "
                               "one HTML page: graph, kernels, memory")
                      ->excludes(verify);
  app.add_option("-o,--output", output, "With --program: the file to write")
      ->capture_default_str()
      ->needs(program);
  try {
    app.parse(argc, argv);
    if (is_program) {
      write_program(path, output, as_json);
      return 0;
    }
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
