#include "train/settings_file.h"

#include "command_line.h"
#include "numbers.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

namespace tessera::train {
namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};

namespace fs = std::filesystem;

constexpr size_t kLargestFile = 1 << 20;
constexpr const char* kAuto = "auto";  // of a switch that is neither on nor off

/// Keys that are flags, but mean one start and not a way to train.
constexpr const char* kCommandLineAlone[] = {"config", "resume", "help"};

std::string place_of(const std::string& path, const toml::source_region& source) {
  return path + ":" + std::to_string(source.begin.line) + ": ";
}

[[noreturn]] void refuse_file(const std::string& message) { throw CLI::ValidationError(message); }

/// A pipe would be empty for the ranks, who read it again; a device has no end.
std::string read_whole(const std::string& path) {
  const auto expected = "--config: expected a TOML file, got ";
  std::error_code error;
  const auto status = fs::status(path, error);
  if (fs::is_directory(status)) refuse_file(expected + ("the folder '" + path + "'"));
  if (fs::exists(status) && !fs::is_regular_file(status))
    refuse_file(expected + ("'" + path + "', which is a device, pipe or socket"));
  std::ifstream stream(path, std::ios::binary);
  if (!stream) refuse_file(expected + ("'" + path + "': " + std::strerror(errno)));
  std::string text(kLargestFile + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(stream.gcount()));
  if (text.size() > kLargestFile)
    refuse_file(expected + ("'" + path + "', which has more than 1 MiB"));
  return text;
}

toml::table parse_file(const std::string& path) {
  try {
    return toml::parse(read_whole(path), path);
  } catch (const toml::parse_error& error) {
    refuse_file(place_of(path, error.source()) +
                "expected TOML: " + std::string(error.description()));
  }
}

std::string kind_of(const toml::node& node) {
  switch (node.type()) {
    case toml::node_type::string:
      return "a string";
    case toml::node_type::integer:
      return "an integer";
    case toml::node_type::floating_point:
      return "a float";
    case toml::node_type::boolean:
      return "a boolean";
    case toml::node_type::array:
      return "an array";
    default:
      return "a date or time";
  }
}

/// The value as a flag would have it; none: it is of another type.
std::optional<std::string> text_for(const Field& field, const toml::node& node) {
  const auto integer = [&]() -> std::optional<std::string> {
    if (const auto* value = node.as_integer()) return std::to_string(value->get());
    return std::nullopt;
  };
  const auto boolean = [&]() -> std::optional<std::string> {
    if (const auto* value = node.as_boolean()) return value->get() ? "true" : "false";
    return std::nullopt;
  };
  return std::visit(Overloaded{[&](const double*) -> std::optional<std::string> {
                                 if (const auto* value = node.as_floating_point())
                                   return tool::number_text(value->get());
                                 return integer();
                               },
                               [&](const bool*) { return boolean(); },
                               [&](const std::optional<bool>*) { return boolean(); },
                               [&](const std::string*) -> std::optional<std::string> {
                                 if (const auto* value = node.as_string()) return value->get();
                                 return std::nullopt;
                               },
                               [](const std::vector<std::string>*) -> std::optional<std::string> {
                                 return std::nullopt;
                               },
                               [&](const auto*) { return integer(); }},
                    field.value);
}

std::string expected_type(const Field& field) {
  return std::visit(
      Overloaded{[](const double*) { return "a number"; },
                 [](const bool*) { return "true or false"; },
                 [](const std::optional<bool>*) { return "true, false or \"auto\""; },
                 [](const std::string*) { return "a string"; },
                 [](const std::vector<std::string>*) { return "a string or an array of strings"; },
                 [](const auto*) { return "an integer"; }},
      field.value);
}

std::optional<std::vector<std::string>> texts_in(const toml::node& node) {
  if (const auto* value = node.as_string()) return std::vector{value->get()};
  const auto* array = node.as_array();
  if (array == nullptr) return std::nullopt;
  std::vector<std::string> texts;
  for (const auto& element : *array) {
    if (!element.is_string()) return std::nullopt;
    texts.push_back(element.as_string()->get());
  }
  return texts;
}

void set(const Field& field, const toml::node& node, const std::string& place) {
  const auto refuse_type = [&] {
    refuse_file(place + field.name() + ": expected " + expected_type(field) + ", got " +
                kind_of(node));
  };
  // Set directly: CLI11 would take a name in brackets apart.
  if (auto* const* texts = std::get_if<std::vector<std::string>*>(&field.value)) {
    const auto found = texts_in(node);
    // What has files unless it is told has to have some.
    if (!found || (found->empty() && !(*texts)->empty())) refuse_type();
    **texts = *found;
    return;
  }
  if (auto* const* flag = std::get_if<std::optional<bool>*>(&field.value);
      flag != nullptr && node.value<std::string>() == kAuto) {
    (*flag)->reset();
    return;
  }
  const auto text = text_for(field, node);
  if (!text) refuse_type();
  try {
    field.option->add_result(*text);
    field.option->run_callback();
  } catch (const CLI::ParseError& error) {
    refuse_file(place + error.what());
  }
}

[[noreturn]] void refuse_key(const std::string& key, const Fields& fields,
                             const std::string& place) {
  if (std::ranges::count(kCommandLineAlone, key) > 0)
    refuse_file(place + "expected settings, got '" + key +
                "', which is for the command line alone");
  std::vector<std::string> known;
  for (const auto& field : fields) known.push_back("--" + field.name());
  const auto meant = tool::nearest_word("--" + key, known);  // as near as a flag may be
  refuse_file(place + "expected names of flags, got '" + key + "'" +
              (meant.empty() ? "" : "; did you mean " + meant.substr(2) + "?"));
}

/// One line of TOML for one field.
toml::table table_of(const Field& field) {
  toml::table table;
  std::visit(Overloaded{[&](const std::vector<std::string>* texts) {
                          toml::array array;
                          for (const auto& text : *texts) array.push_back(text);
                          table.insert(field.name(), std::move(array));
                        },
                        [&](const double* value) { table.insert(field.name(), *value); },
                        [&](const bool* value) { table.insert(field.name(), *value); },
                        [&](const std::optional<bool>* value) {
                          if (*value) {
                            table.insert(field.name(), **value);
                          } else {
                            table.insert(field.name(), kAuto);
                          }
                        },
                        [&](const std::string* value) { table.insert(field.name(), *value); },
                        [&](const auto* value) {
                          table.insert(field.name(), static_cast<int64_t>(*value));
                        }},
             field.value);
  return table;
}

std::string line_of(const Field& field) {
  std::ostringstream text;
  // Quoted with escapes: a literal or multi-line string cannot hold every text.
  text << toml::toml_formatter(table_of(field), toml::format_flags::allow_unicode_strings) << "\n";
  return text.str();
}

}  // namespace

void read_settings(const std::string& path, const Fields& fields) {
  const auto table = parse_file(path);
  std::vector<std::pair<std::string, const toml::node*>> entries;
  for (const auto& [key, node] : table) entries.emplace_back(key.str(), &node);
  std::ranges::stable_sort(entries, {}, [](const auto& entry) {  // what comes first is told first
    return entry.second->source().begin.line;
  });
  for (const auto& [key, node] : entries) {
    const auto place = place_of(path, node->source());
    if (node->is_table() || node->is_array_of_tables())
      refuse_file(place + "expected names of flags at the top level, got a table [" + key + "]");
    const auto field = std::ranges::find(fields, key, &Field::name);
    if (field == fields.end()) refuse_key(key, fields, place);
    if (field->option->empty()) set(*field, *node, place);
  }
}

std::string to_toml(const Fields& fields) {
  const auto is_empty_list = [](const Field& field) {  // which a file can't give
    auto* const* texts = std::get_if<std::vector<std::string>*>(&field.value);
    return texts != nullptr && (*texts)->empty();
  };
  std::string text;
  for (const auto& field : fields) {
    if (field.name() != "run" && !is_empty_list(field)) text += line_of(field);
  }
  return text;
}

void check_text(const Fields& fields) {
  for (const auto& field : fields) {
    try {
      if (toml::parse(line_of(field)) == table_of(field)) continue;
    } catch (const toml::parse_error&) {  // told below
    }
    refuse_file("--" + field.name() +
                ": expected text in UTF-8, which the run's config.toml holds");
  }
}

}  // namespace tessera::train
