#include "adopt/adopt.h"

#include "adopt/project.h"
#include "adopt/unified_diff.h"
#include "base/text.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>

namespace tessera::tool {
namespace {

using adopt::Note;
using adopt::Project;
using adopt::Result;

constexpr int kFailure = 1;

struct AdoptOptions {
  std::vector<std::string> files;
  bool writes = false;
  bool checks = false;
};

bool has_colours() {
  const char* no_color = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  const bool is_dumb = terminal != nullptr && std::string(terminal) == "dumb";
  return ::isatty(STDOUT_FILENO) == 1 && !is_dumb && (no_color == nullptr || *no_color == '\0');
}

std::string counted(std::size_t count, const std::string& word) {
  return std::to_string(count) + " " + word + (count == 1 ? "" : "s");
}

std::string text_of(const std::string& file, const Note& note) {
  std::string names;
  for (const auto& name : note.names) names += (names.empty() ? "" : ", ") + name;
  const auto places = note.places == 1 ? "" : " (" + std::to_string(note.places) + " places)";
  return printable(file) + ":" + std::to_string(note.line) + ": " +
         (note.needs_hand ? "left " : "stays: ") + printable(names) + places + ": " + note.reason;
}

/// What a person has to look at comes last, where it is seen.
void tell_notes(const std::vector<Result>& results) {
  for (const bool needs_hand : {false, true}) {
    for (const auto& result : results) {
      for (const auto& note : result.rewrite.notes) {
        if (note.needs_hand == needs_hand) std::cerr << text_of(result.source->name, note) << "\n";
      }
    }
  }
}

void tell_errors(const std::vector<std::string>& errors) {
  for (const auto& error : errors) std::cerr << "tessera adopt: " << printable(error) << "\n";
}

void show(const std::vector<Result>& results) {
  const bool is_coloured = has_colours();
  for (const auto& result : results) {
    if (result.rewrite.edits.empty()) continue;
    const auto diff =
        adopt::unified_diff(result.source->name, result.source->text, result.rewrite.edits);
    std::cout << (is_coloured ? adopt::coloured(diff) : diff);
  }
  std::cout << std::flush;
}

void write(const std::vector<Result>& results) {
  std::vector<adopt::NewText> texts;
  for (const auto& [source, rewrite, places] : results) {
    if (rewrite.edits.empty()) continue;
    texts.push_back({source->path, source->text, adopt::apply_edits(source->text, rewrite.edits)});
  }
  adopt::replace_files(texts);
  for (const auto& result : results) {
    if (result.places > 0)
      std::cout << printable(result.source->name) << ": " << counted(result.places, "place")
                << " changed\n";
  }
  std::cout << std::flush;
}

void tell_summary(const std::vector<Result>& results, const AdoptOptions& options) {
  std::size_t files = 0;
  std::size_t places = 0;
  for (const auto& result : results) {
    files += result.places > 0 ? 1 : 0;
    places += result.places;
  }
  const auto of = std::to_string(files) + " of " + counted(results.size(), "file");
  std::cerr << "tessera adopt: ";
  if (files == 0) {
    std::cerr << "nothing to change in " << counted(results.size(), "file") << "\n";
  } else if (options.writes) {
    std::cerr << "changed " << of << ", " << counted(places, "place") << "\n";
  } else {
    std::cerr << of << " would change, " << counted(places, "place") << "; --write changes them\n";
  }
}

/// The exit code.
int adopt_files(const AdoptOptions& options) {
  const auto found = adopt::find_files(options.files);
  Project project(found.files);
  const auto results = project.results();
  auto errors = found.unreadable;
  errors.insert(errors.end(), project.errors().begin(), project.errors().end());
  if (options.writes && !errors.empty()) {
    tell_errors(errors);
    std::cerr << "tessera adopt: nothing was written; correct these files or leave them out\n";
    return kFailure;
  }
  options.writes ? write(results) : show(results);
  for (const auto& reason : found.left_out) std::cerr << "left " << printable(reason) << "\n";
  tell_notes(results);
  for (const auto& name : project.also()) {
    std::cerr << "left " << printable(name)
              << ": it is included and would change as well: name it, too\n";
  }
  tell_errors(errors);
  tell_summary(results, options);
  const bool would_change =
      std::ranges::any_of(results, [](const auto& result) { return result.places > 0; });
  return !errors.empty() || (options.checks && would_change) ? kFailure : 0;
}

}  // namespace

void add_adopt_command(CLI::App& app, CommandLine& line) {
  auto* adopt_app = app.add_subcommand(
      "adopt", "Make the modules of a libtorch program hookable: show the change, or write it");
  auto options = std::make_shared<AdoptOptions>();
  adopt_app->footer(
      "tessera adopt FILE... [--write | --check]\n"
      "TORCH_MODULE becomes TESSERA_MODULE, torch::nn::Linear becomes tessera::nn::Linear, and\n"
      "<tessera/nn.h> is included. Without --write files stay as they are. Name all files of a\n"
      "program together. In folders: *.h, *.hpp, *.hh, *.hxx, *.cpp, *.cc, *.cxx, *.cu, *.cuh.");
  adopt_app->add_option("FILE", options->files, "Sources, or folders of them")->required();
  auto* write_flag = adopt_app->add_flag("--write", options->writes, "Change the files");
  adopt_app->add_flag("--check", options->checks, "Return 1 if a file would change")
      ->excludes(write_flag);
  adopt_app->callback([options, &line] {
    try {
      line.exit_code = adopt_files(*options);
    } catch (const std::exception& error) {
      std::cerr << "tessera adopt: " << printable(error.what()) << "\n";
      line.exit_code = kFailure;
    }
  });
}

}  // namespace tessera::tool
