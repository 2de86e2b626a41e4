#include "adopt/names.h"

namespace tessera::adopt {
namespace {

constexpr std::string_view kTorchNn = "torch::nn";
// Those that programs name. Others of libtorch need not be known.
constexpr const char* kKnown[] = {"torch::nn::functional",
                                  "torch::nn::init",
                                  "torch::nn::utils",
                                  "torch::nn::parallel",
                                  "torch::optim",
                                  "torch::data",
                                  "tessera::nn",
                                  "at",
                                  "c10"};

std::string joined(const std::string& space, std::string_view word) {
  return space.empty() ? std::string(word) : space + "::" + std::string(word);
}

/// False for the global namespace, which has none.
bool go_outside(std::string& scope) {
  if (scope.empty()) return false;
  const auto end = scope.rfind("::");
  scope.resize(end == std::string::npos ? 0 : end);
  return true;
}

}  // namespace

Names::Names() {
  for (const char* path : kKnown) declare(path);
}

void Names::declare(const std::string& path) {
  for (std::string scope = path; spaces_.try_emplace(scope).second && go_outside(scope);) {
  }
}

void Names::add(const Fact& fact) {
  declare(fact.scope);
  auto& space = spaces_.find(fact.scope)->second;
  switch (fact.kind) {
    case Fact::Kind::Alias: {
      std::string unknown = "?";  // hides an outer namespace of this name
      for (const auto word : fact.target.words) unknown += "::" + std::string(word);
      space.aliases[fact.name] = resolve(fact.scope, fact.target).value_or(unknown);
      return;
    }
    case Fact::Kind::Directive:
      if (const auto path = resolve(fact.scope, fact.target)) space.directives.push_back(*path);
      return;
    case Fact::Kind::Using: {
      auto meaning = look_up(fact.scope, fact.target);
      // A name of more words, as torch::nn::Linear::Impl, is something else.
      if (meaning.at + 1 != fact.target.words.size()) meaning = {};
      meaning.way = LookupResult::Way::Using;
      meaning.at = 0;
      space.usings[fact.name] = meaning;
      return;
    }
    case Fact::Kind::Namespace:
    case Fact::Kind::Hookable:
    case Fact::Kind::Include:
      return;
  }
}

std::optional<std::string> Names::child(const std::string& space, std::string_view word) const {
  Visited visited;
  return child(space, word, visited);
}

std::optional<std::string> Names::child(const std::string& space, std::string_view word,
                                        Visited& visited) const {
  const auto found = spaces_.find(space);
  if (found == spaces_.end() || !visited.insert(space).second) return std::nullopt;
  const auto alias = found->second.aliases.find(word);
  if (alias != found->second.aliases.end()) return alias->second;
  auto path = joined(space, word);
  if (spaces_.contains(path)) return path;
  for (const auto& directive : found->second.directives) {
    if (auto inside = child(directive, word, visited)) return inside;
  }
  return std::nullopt;
}

std::optional<std::string> Names::find(const std::string& scope, std::string_view word) const {
  std::string outer = scope;
  do {
    if (auto path = child(outer, word)) return path;
  } while (go_outside(outer));
  return std::nullopt;
}

std::optional<std::string> Names::resolve(const std::string& scope,
                                          const QualifiedName& words) const {
  std::optional<std::string> path;
  for (const auto word : words.words) {
    path = path ? child(*path, word) : words.is_global ? child("", word) : find(scope, word);
    if (!path) return std::nullopt;
  }
  return path;
}

bool Names::reaches_torch_nn(const std::string& space, Visited& visited) const {
  if (space == kTorchNn) return true;
  const auto found = spaces_.find(space);
  if (found == spaces_.end() || !visited.insert(space).second) return false;
  for (const auto& directive : found->second.directives) {
    if (reaches_torch_nn(directive, visited)) return true;
  }
  return false;
}

LookupResult Names::look_up_class(std::string scope, std::string_view word) const {
  do {
    const auto found = spaces_.find(scope);
    if (found != spaces_.end()) {
      const auto& usings = found->second.usings;
      if (const auto known = usings.find(word); known != usings.end()) return known->second;
    }
    if (Visited visited; reaches_torch_nn(scope, visited)) {
      return {.way = LookupResult::Way::Directive,
              .space = std::string(kTorchNn),
              .name = std::string(word)};
    }
  } while (go_outside(scope));
  return {};
}

LookupResult Names::look_up(const std::string& scope, const QualifiedName& words) const {
  if (words.words.empty()) return {};
  const auto first = words.words.front();
  auto space = words.words.size() < 2 ? std::nullopt
               : words.is_global      ? child("", first)
                                      : find(scope, first);
  if (!space) return look_up_class(words.is_global ? "" : scope, first);
  std::size_t at = 1;
  for (; at + 1 < words.words.size(); ++at) {
    auto inside = child(*space, words.words[at]);
    if (!inside) break;
    space = std::move(inside);
  }
  const auto found = spaces_.find(*space);
  if (found != spaces_.end()) {
    const auto known = found->second.usings.find(words.words[at]);
    if (known != found->second.usings.end()) {
      auto meaning = known->second;
      meaning.at = at;
      return meaning;
    }
  }
  return {.way = LookupResult::Way::Written,
          .space = *space,
          .name = std::string(words.words[at]),
          .at = at};
}

}  // namespace tessera::adopt
