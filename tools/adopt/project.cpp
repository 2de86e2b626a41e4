#include "adopt/project.h"

#include "adopt/rewrite.h"

#include <algorithm>
#include <optional>

namespace tessera::adopt {
namespace {

constexpr const char* kLine = "#include <tessera/nn.h>";

struct Place {
  std::size_t token;
  int depth;  // of #if around it
};

/// The first of the least deep: one in a condition may not be read.
void take(std::optional<Place>& best, const Place& place) {
  if (!best || place.depth < best->depth) best = place;
}

struct Places {
  std::optional<Place> libtorch;  // its first #include
  std::optional<Place> last;      // the last of all
  std::optional<Place> once;      // #pragma once
};

Places places_of(const std::vector<Token>& tokens) {
  Places places;
  int depth = 0;
  for (std::size_t at = 0; at + 1 < tokens.size(); ++at) {
    if (!tokens[at].begins_directive) continue;
    const auto name = tokens[at + 1].text;
    if (name.starts_with("if")) ++depth;
    if (name == "endif") --depth;
    if (name == "pragma") take(places.once, {at, depth});
    if (at + 2 >= tokens.size() || tokens[at + 2].kind != Token::Kind::HeaderName) continue;
    const auto file = tokens[at + 2].text.substr(1);
    const bool is_libtorch = file.starts_with("torch/") || file.starts_with("ATen/");
    if (is_libtorch) take(places.libtorch, {at, depth});
    if (!places.last || depth <= places.last->depth) places.last = {at, depth};
  }
  return places;
}

std::size_t begin_of_line(const std::string& text, std::size_t offset) {
  const auto end = text.rfind('\n', offset);
  return offset == 0 || end == std::string::npos ? 0 : end + 1;
}

/// Behind the line, and those that it continues on.
std::size_t end_of_line(const std::string& text, std::size_t offset) {
  auto end = text.find('\n', offset);
  while (end != std::string::npos && end > 0) {
    const auto last = text.find_last_not_of(" \t\r", end - 1);
    if (last == std::string::npos || last < offset || text[last] != '\\') return end + 1;
    end = text.find('\n', end + 1);
  }
  return text.size();
}

}  // namespace

Edit include_edit(const Source& source) {
  const auto& text = source.text;
  const auto& tokens = source.tokens;
  const auto places = places_of(tokens);
  const auto first_line = text.find('\n');
  const bool has_cr =
      first_line != std::string::npos && first_line > 0 && text[first_line - 1] == '\r';
  const std::string end = has_cr ? "\r\n" : "\n";
  const auto offset = [&](std::size_t token) {
    return static_cast<std::size_t>(tokens[token].text.data() - text.data());
  };
  std::size_t at = tokens.empty() ? 0 : begin_of_line(text, offset(0));
  if (places.libtorch) {
    at = begin_of_line(text, offset(places.libtorch->token));
  } else if (places.last) {
    at = end_of_line(text, offset(places.last->token));
  } else if (places.once) {
    at = end_of_line(text, offset(places.once->token));
  }
  if (at == 0 && text.starts_with("\xef\xbb\xbf")) at = 3;
  const bool lacks_end = at == text.size() && !text.ends_with('\n');
  return {at, 0, lacks_end ? end + kLine : kLine + end};
}

namespace {

namespace fs = std::filesystem;

constexpr int kMostFoldersUp = 6;  // where headers of a program are looked for

bool includes_tessera(const Source& source) {
  return std::ranges::any_of(source.outline.facts, [](const Fact& fact) {
    return fact.kind == Fact::Kind::Include &&
           (fact.name == "tessera/nn.h" || fact.name == "tessera/tessera.h");
  });
}

void collect(const Source& source, std::set<const Source*>& found) {
  if (!found.insert(&source).second) return;
  for (const auto& [token, included] : source.includes) collect(*included, found);
}

/// What is included comes before what includes it.
void sort_by_includes(const Source& source, std::set<const Source*>& seen,
                      std::vector<const Source*>& order) {
  if (!seen.insert(&source).second) return;
  for (const auto& [token, included] : source.includes) sort_by_includes(*included, seen, order);
  order.push_back(&source);
}

}  // namespace

std::set<const Source*> closure_of(const Source& source) {
  std::set<const Source*> found;
  collect(source, found);
  return found;
}

Project::Project(const std::vector<FoundFile>& files) {
  for (const auto& file : files) {
    if (auto* source = load(file.name, file.path, /*is_given=*/true)) given_.push_back(source);
  }
  for (auto* source : given_) find_includes(*source);
  for (const auto& [path, source] : sources_) find_obstacles(*source);
}

Source* Project::load(const std::string& name, const fs::path& path, bool is_given) {
  const auto known = sources_.find(path);
  if (known != sources_.end()) return known->second.get();
  auto source = std::make_unique<Source>(Source{.name = name, .path = path, .is_given = is_given});
  try {
    source->text = read_source(path);
    source->tokens = tokens_of(source->text);
    source->outline = outline_of(source->tokens);
  } catch (const SourceError& error) {
    if (is_given)
      errors_.push_back(name + ":" + std::to_string(error.line()) + ": " + error.what());
    return nullptr;
  } catch (const FileError& error) {
    if (is_given) errors_.push_back(name + ": " + error.what());
    return nullptr;
  }
  return sources_.emplace(path, std::move(source)).first->second.get();
}

void Project::find_includes(Source& source) {
  std::vector<Source*> waiting = {&source};
  while (!waiting.empty()) {
    auto& next = *waiting.back();
    waiting.pop_back();
    for (const auto& fact : next.outline.facts) {
      if (fact.kind != Fact::Kind::Include || next.includes.contains(fact.token)) continue;
      const auto count = sources_.size();
      const auto* found = find_include(next, fact);
      if (found == nullptr || found == &next) continue;
      next.includes[fact.token] = found;
      if (sources_.size() > count) waiting.push_back(sources_.at(found->path).get());
    }
  }
}

const Source* Project::find_include(const Source& source, const Fact& include) {
  std::error_code error;
  if (include.is_quoted) {
    auto folder = source.path.parent_path();
    for (int up = 0; up < kMostFoldersUp; ++up, folder = folder.parent_path()) {
      for (const char* below : {"", "include", "src"}) {
        const auto path = fs::canonical(folder / below / include.name, error);
        if (error || !fs::is_regular_file(path, error)) continue;
        const auto name = path.lexically_proximate(fs::current_path(error)).string();
        if (const auto* found = load(name, path, /*is_given=*/false)) return found;
      }
      if (fs::exists(folder / ".git", error) || !folder.has_relative_path()) break;
    }
  }
  for (const auto* given : given_) {
    if (("/" + given->path.string()).ends_with("/" + include.name)) return given;
  }
  return nullptr;
}

void Project::find_obstacles(Source& source) const {
  const auto closure = closure_of(source);
  for (auto& [name, line] : source.outline.modules) {
    if (line.macro == "TESSERA_MODULE") continue;
    if (!line.has_default_impl) {
      line.obstacle = "TESSERA_MODULE takes a class " + line.impl + ": write `using " + line.impl +
                      " = …; TESSERA_MODULE(" + name + ");`";
    }
    for (const auto* each : closure) {
      const auto found = each->outline.classes.find(line.impl);
      if (found == each->outline.classes.end() || !line.obstacle.empty()) continue;
      line.obstacle = obstacle_of(line.impl, found->second);
    }
  }
}

bool Project::is_holder(const std::string& impl) const {
  return std::ranges::any_of(sources_, [&](const auto& entry) {
    return std::ranges::any_of(entry.second->outline.modules, [&](const auto& module) {
      return module.second.impl == impl || !module.second.has_default_impl;
    });
  });
}

std::vector<Result> Project::results() {
  std::vector<Result> results;
  for (const auto* source : given_) {
    try {
      auto changes = rewrite(*source, [this](const auto& impl) { return is_holder(impl); });
      const auto places = changes.edits.size();
      results.push_back({source, std::move(changes), places});
    } catch (const SourceError& error) {
      errors_.push_back(source->name + ":" + std::to_string(error.line()) + ": " + error.what());
    }
  }
  add_includes(results);
  return results;
}

void Project::add_includes(std::vector<Result>& results) const {
  std::set<const Source*> seen;
  std::vector<const Source*> order;
  for (const auto* source : given_) sort_by_includes(*source, seen, order);
  std::set<const Source*> with_include;
  for (const auto& [path, source] : sources_) {
    if (includes_tessera(*source)) with_include.insert(source.get());
  }
  for (const auto* source : order) {
    const auto result = std::ranges::find(results, source, &Result::source);
    if (result == results.end() || result->rewrite.edits.empty()) continue;
    const auto closure = closure_of(*source);
    const bool has_it =
        std::ranges::any_of(closure, [&](const auto* each) { return with_include.contains(each); });
    if (has_it) continue;
    auto& edits = result->rewrite.edits;
    edits.insert(edits.begin(), include_edit(*source));  // before others at its place
    std::ranges::stable_sort(edits, {}, &Edit::offset);
    with_include.insert(source);
  }
}

std::vector<std::string> Project::also() {
  std::vector<std::string> names;
  for (const auto& [path, source] : sources_) {
    if (source->is_given) continue;
    Source as_given = *source;  // its tokens refer to the text of the other
    as_given.is_given = true;
    try {
      const auto tokens = tokens_of(as_given.text);
      as_given.tokens = tokens;
      const auto changes = rewrite(as_given, [](const auto&) { return true; });
      if (!changes.edits.empty()) names.push_back(source->name);
    } catch (const SourceError&) {  // said when it is given
    }
  }
  return names;
}

}  // namespace tessera::adopt
