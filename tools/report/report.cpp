#include "report/report.h"

#include "base/text.h"
#include "report/files.h"
#include "report/page.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <memory>

namespace tessera::tool {
namespace {

namespace fs = std::filesystem;
using report::ReportError;
using report::Run;

struct ReportOptions {
  std::vector<std::string> folders;
  std::string output = "report.html";
  std::string open = "yes";
};

// What a run folder holds that nobody can make anew.
constexpr const char* kRunFiles[] = {"metrics.jsonl",    "config.json", "run.json",
                                     "timeline.json",    "program.cpp", "program.txt",
                                     "program-part.txt", "sample.txt"};

void check_output(const fs::path& output, const std::vector<Run>& runs) {
  if (fs::is_directory(output)) {
    throw ReportError("expected a file after -o, got the folder " + output.string() +
                      "; name a file in it, e.g. " + (output / "report.html").string());
  }
  std::error_code ignored;
  for (const auto& run : runs) {
    for (const char* name : kRunFiles) {
      if (fs::equivalent(output, run.folder / name, ignored)) {
        throw ReportError("expected a new file after -o, got " + output.string() +
                          ", which is part of the run itself");
      }
    }
  }
}

/// Where a person sits in front of a desktop, shows the page; elsewhere does nothing.
void open_in_browser(const fs::path& page) {
  const bool has_desktop =
      std::getenv("DISPLAY") != nullptr || std::getenv("WAYLAND_DISPLAY") != nullptr;
  if (!has_desktop || ::isatty(STDOUT_FILENO) == 0) return;
  if (::fork() != 0) return;
  ::setsid();
  const std::string path = fs::absolute(page).string();
  ::execlp("xdg-open", "xdg-open", path.c_str(), nullptr);
  ::_exit(0);
}

void write_report(const ReportOptions& options) {
  const auto [runs, left_out] = report::read_runs({options.folders.begin(), options.folders.end()});
  check_output(options.output, runs);
  const std::string page = report::make_page(runs);
  report::write_file(options.output, page);
  for (const auto& reason : left_out)
    std::cerr << "tessera report: left out: " << printable(reason) << "\n";
  for (const auto& run : runs) {
    for (const auto& note : run.notes)
      std::cerr << "tessera report: " << printable(run.name + ": " + note) << "\n";
  }
  std::cout << options.output << ": " << runs.size() << (runs.size() == 1 ? " run, " : " runs, ")
            << report::size_text(page.size()) << "\n";
  if (options.open == "yes") open_in_browser(options.output);
}

}  // namespace

void add_report_command(CLI::App& app, CommandLine& line) {
  auto* report_app = app.add_subcommand("report", "Write runs of tessera train as one HTML page");
  auto options = std::make_shared<ReportOptions>();
  report_app->footer(
      "tessera report RUN... [-o report.html] [--open no]\n"
      "The page holds everything it needs and works offline; several runs are compared.");
  report_app->add_option("RUN", options->folders, "Folders that tessera train wrote")->required();
  report_app->add_option("-o,--output", options->output, "File to write")->capture_default_str();
  report_app->add_option("--open", options->open, "Show it in a browser if there is a desktop")
      ->capture_default_str()
      ->check(CLI::IsMember({"yes", "no"}));
  report_app->callback([options, &line] {
    try {
      write_report(*options);
    } catch (const std::exception& error) {
      std::cerr << "tessera report: " << printable(error.what()) << "\n";
      line.exit_code = 1;
    }
  });
}

}  // namespace tessera::tool
