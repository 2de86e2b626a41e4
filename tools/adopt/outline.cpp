#include "adopt/outline.h"

#include "adopt/names.h"
#include "adopt/reader.h"

namespace tessera::adopt {
namespace {

bool is_name_of_torch(std::string_view name) {
  if (module_names().contains(name)) return true;
  return name.ends_with("Impl") && module_names().contains(name.substr(0, name.size() - 4));
}

class OutlineReader : public Reader {
 public:
  explicit OutlineReader(const std::vector<Token>& tokens) : Reader(tokens) {}

  Outline run() {
    read();
    return std::move(outline_);
  }

 private:
  // What blocks and classes declare is seen in them alone.
  void on_fact(const Fact& fact) override {
    if (fact.scope.find('{') == std::string::npos) outline_.facts.push_back(fact);
  }

  void on_declared(std::string_view name) override {
    if (is_name_of_torch(name)) outline_.own_names.emplace(name);
  }

  void on_class(const ClassHead& head) override {
    on_declared(head.name);
    if (head.is_enum) return;
    outline_.classes[head.name] = {.line = token(head.brace).line,
                                   .is_struct = head.is_struct,
                                   .is_final = head.is_final,
                                   .bases = head.bases};
  }

  void on_chain(const NameTokens& chain) override {
    if (chain.is_global || chain.tokens.size() != 1) return;
    const auto at = chain.tokens[0];
    const auto& word = token(at);
    if (word.is("forward")) return read_forward(at);
    const bool is_macro =
        word.is("TORCH_MODULE") || word.is("TORCH_MODULE_IMPL") || word.is("TESSERA_MODULE");
    if (is_macro && token(at + 1).is("(") && token(at + 2).is_word()) return read_module(at);
    if (is_name_of_torch(word.text) && is_declarator(at)) outline_.own_names.emplace(word.text);
  }

  /// `Tensor Linear(`, `auto& Linear =`.
  bool is_declarator(std::size_t at) const {
    const auto& before = token(at - 1);
    const auto& behind = token(at + 1);
    const bool follows_type =
        before.is_word() || before.is(">") || before.is("&") || before.is("*") || before.is("auto");
    const bool is_named = behind.is("=") || behind.is(";") || behind.is(",") || behind.is(")") ||
                          behind.is("{") || behind.is("(") || behind.is("[") || behind.is(":");
    static constexpr std::string_view kNoTypes[] = {
        "return",   "new",       "else",    "do",      "case",     "throw",    "co_return",
        "co_yield", "const",     "static",  "inline",  "extern",   "explicit", "volatile",
        "friend",   "mutable",   "public",  "private", "and",      "or",       "not",
        "typename", "constexpr", "virtual", "using",   "co_await", "protected"};
    for (const auto word : kNoTypes) {
      if (before.is(word)) return false;
    }
    return follows_type && is_named && before.in_directive == token(at).in_directive;
  }

  void read_forward(std::size_t at) {
    const auto& before = token(at - 1);
    const bool follows_type = (before.is_word() && !before.is("return")) || before.is(">") ||
                              before.is("&") || before.is("*");
    if (frame().kind != Scope::Kind::Class || frame().parentheses > 0) return;
    if (!follows_type || !token(at + 1).is("(")) return;
    auto& facts = outline_.classes[frame().head.name];
    ++(is_in_alternative() ? facts.alternative_forwards : facts.forwards);
    facts.has_template |= token(frame().statement).is("template");
    facts.has_private |= !frame().is_public;
    facts.has_reference |= before.is("&");
  }

  void read_module(std::size_t at) {
    const std::string name(token(at + 2).text);
    ModuleLine line{.macro = std::string(token(at).text), .impl = name + "Impl"};
    const bool has_impl = line.macro == "TORCH_MODULE_IMPL";
    line.has_default_impl = !has_impl || (token(at + 3).is(",") && token(at + 4).is(line.impl) &&
                                          token(at + 5).is(")"));
    on_declared(name);
    outline_.modules[name] = std::move(line);
    outline_.facts.push_back(
        {.kind = Fact::Kind::Hookable, .scope = frame().path, .name = name, .token = at});
  }

  Outline outline_;
};

}  // namespace

Outline outline_of(const std::vector<Token>& tokens) { return OutlineReader(tokens).run(); }

std::string obstacle_of(const std::string& name, const ClassFacts& facts) {
  if (facts.is_final) return name + " is final, and hooks derive from it: leave `final` out";
  if (facts.has_template)
    return name + "::forward is a template: TESSERA_MODULE takes one plain function";
  if (facts.forwards > 1 || facts.alternative_forwards > 1) {
    return name +
           " has several functions forward: rename all but one and name them in "
           "TESSERA_MODULE_METHOD";
  }
  if (facts.has_private) return name + "::forward is not public";
  if (facts.has_reference) return name + "::forward returns a reference: return a value";
  if (facts.forwards + facts.alternative_forwards > 0) return "";
  bool may_inherit = false;
  for (const auto& base : facts.bases) {
    if (base.back() == "SequentialImpl") {
      return name + " has the forward of Sequential, which is a template: give it one of its own";
    }
    may_inherit |= base.back() != "Module" && base.back() != "Cloneable" && base.back() != name &&
                   base.back() != "enable_shared_from_this";
  }
  return may_inherit ? "" : name + " has no forward, so there is no call to hook";
}

}  // namespace tessera::adopt
