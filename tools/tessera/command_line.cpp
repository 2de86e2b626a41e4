#include "command_line.h"

#include <algorithm>
#include <numeric>

namespace tessera::tool {
namespace {

// What other launchers call it: too far from our word to be a slip.
constexpr struct {
  const char* theirs;
  const char* ours;
} kElsewhere[] = {
    {"--nproc-per-node", "--ranks"},
    {"--nproc_per_node", "--ranks"},
    {"--ntasks", "--ranks"},
    {"-np", "--ranks"},
    {"--np", "--ranks"},
    {"--max_restarts", "--max-restarts"},
};

/// Letters to change, add or leave out to make one word of the other.
std::size_t distance(const std::string& from, const std::string& to) {
  std::vector<std::size_t> row(to.size() + 1);  // by how much of `to`, for a beginning of `from`
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 1; i <= from.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= to.size(); ++j) {
      const std::size_t changed = diagonal + (from[i - 1] == to[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({changed, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back();
}

std::vector<std::string> options_of(const CLI::App& app) {
  std::vector<std::string> words;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) words.push_back("--" + name);
    for (const auto& name : option->get_snames()) words.push_back("-" + name);
  }
  return words;
}

std::string list(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

[[noreturn]] void refuse(const std::string& kind, const std::string& word,
                         const std::vector<std::string>& valid) {
  std::string meant;
  for (const auto& [theirs, ours] : kElsewhere) {
    if (word == theirs && std::ranges::count(valid, ours) > 0) meant = ours;
  }
  if (meant.empty()) meant = nearest_word(word, valid);
  throw CLI::ValidationError(
      "unknown " + kind + " '" + word + "', " +
      (meant.empty() ? "expected one of " + list(valid) : "did you mean " + meant + "?"));
}

/// "--env" of "--env=A=1", "-n" of "-n4".
std::string name_of(const std::string& word) {
  if (word.starts_with("--")) return word.substr(0, word.find('='));
  return word.substr(0, 2);
}

void refuse_unknown_option(const CLI::App& app, const std::string& word) {
  if (!word.starts_with('-') || word == "-" || word == "--") return;
  if (app.get_option_no_throw(name_of(word)) == nullptr) refuse("option", word, options_of(app));
}

}  // namespace

const CLI::App* find_subcommand(const CLI::App& app, const std::string& name) {
  for (const auto* known : app.get_subcommands({})) {
    if (known->get_name() == name) return known;
  }
  return nullptr;
}

std::string nearest_word(const std::string& word, const std::vector<std::string>& valid) {
  std::string nearest;
  std::size_t least = word.size() / 3 + 1;
  for (const auto& candidate : valid) {
    const std::size_t changes = distance(word, candidate);
    if (changes >= least) continue;
    least = changes;
    nearest = candidate;
  }
  return nearest;
}

void refuse_unknown_words(const CLI::App& app, const std::vector<std::string>& arguments) {
  if (arguments.empty()) return;
  const std::string& first = arguments[0];
  refuse_unknown_option(app, first);
  if (first.starts_with('-')) return;
  const auto* subcommand = find_subcommand(app, first);
  if (subcommand == nullptr) {
    std::vector<std::string> names;
    for (const auto* known : app.get_subcommands({})) names.push_back(known->get_name());
    refuse("subcommand", first, names);
  }
  if (subcommand->get_allow_extras()) return;
  refuse_unknown_options(*subcommand, {arguments.begin() + 1, arguments.end()});
}

void refuse_unknown_options(const CLI::App& app, const std::vector<std::string>& arguments) {
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    refuse_unknown_option(app, arguments[at]);
    const auto* option = app.get_option_no_throw(arguments[at]);
    if (option != nullptr && option->get_items_expected_min() > 0) ++at;  // its value
  }
}

}  // namespace tessera::tool
