#include "adopt/reader.h"

#include <algorithm>
#include <array>

namespace tessera::adopt {
namespace {

constexpr std::size_t kDeepest = 500;       // braces, and #if, in each other
constexpr std::size_t kLongestHead = 1024;  // tokens of the beginning of a class
constexpr std::size_t kMostWords = 64;      // of one name

// Words before a name that are no part of it, and no type.
constexpr std::array<std::string_view, 45> kKeywords = {
    "return",    "new",      "delete",   "throw",    "case",      "else",     "do",
    "if",        "while",    "for",      "switch",   "goto",      "const",    "constexpr",
    "consteval", "static",   "mutable",  "volatile", "inline",    "extern",   "virtual",
    "explicit",  "friend",   "typename", "typedef",  "template",  "register", "thread_local",
    "co_return", "co_await", "co_yield", "operator", "public",    "private",  "protected",
    "and",       "or",       "not",      "default",  "constinit", "requires", "sizeof",
    "decltype",  "auto",     "noexcept"};

bool is_keyword(const Token& token) {
  return token.is_word() && std::ranges::find(kKeywords, token.text) != kKeywords.end();
}

std::string inside(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "::" + name;
}

}  // namespace

const Token& Reader::token(std::size_t index) const {
  static const Token kNone;
  return index < tokens_.size() ? tokens_[index] : kNone;
}

QualifiedName Reader::words(const NameTokens& chain) const {
  QualifiedName words{.is_global = chain.is_global};
  for (const auto index : chain.tokens) words.words.push_back(tokens_[index].text);
  return words;
}

void Reader::read() {
  for (std::size_t at = 0; at < tokens_.size();) at = read_token(at);
}

std::size_t Reader::read_token(std::size_t at) {
  const auto& current = tokens_[at];
  if (current.begins_directive) return read_directive(at);
  if (current.is_word()) return read_word(at);
  if (current.is("::")) {
    const auto& before = token(at - 1);
    const bool goes_on = at > 0 && (before.is(">") || before.is(")") || before.is("]"));
    if (goes_on || !token(at + 1).is_word()) return at + 2;
    const auto chain = chain_at(at);
    on_chain(chain);
    return chain.tokens.back() + 1;
  }
  mark(at);
  return at + 1;
}

std::size_t Reader::read_word(std::size_t at) {
  const auto& current = tokens_[at];
  const auto& before = at > 0 ? tokens_[at - 1] : token(tokens_.size());
  if (before.is(".") || before.is("->")) return chain_at(at).tokens.back() + 1;
  if (current.is("namespace")) return read_namespace(at);
  if (current.is("using")) return read_using(at);
  if (current.is("class") || current.is("struct") || current.is("union") || current.is("enum")) {
    if (!before.is("enum")) read_class(at);
    return at + 1;
  }
  if (is_keyword(current)) return at + 1;
  if (frame().kind == Scope::Kind::Enum && frame().parentheses == 0 &&
      (before.is("{") || before.is(","))) {
    if (!frame().head.is_scoped) on_declared(current.text);
    return at + 1;
  }
  const auto chain = chain_at(at);
  const bool is_head = before.is("class") || before.is("struct") || before.is("union");
  if (!is_head || chain.tokens.size() > 1) on_chain(chain);
  return chain.tokens.back() + 1;
}

NameTokens Reader::chain_at(std::size_t at) const {
  NameTokens chain{.is_global = token(at).is("::")};
  const auto begin = at;
  for (at += chain.is_global ? 1 : 0; token(at).is_word(); at += 2) {
    if (chain.tokens.size() == kMostWords)
      throw SourceError(token(begin).line, "a name of too many words");
    const bool is_same_line =
        chain.tokens.empty() || token(at).in_directive == token(chain.tokens[0]).in_directive;
    if (!is_same_line) break;
    chain.tokens.push_back(at);
    if (!token(at + 1).is("::") || !token(at + 2).is_word()) break;
  }
  return chain;
}

void Reader::mark(std::size_t at) {
  auto& top = frames_.back();
  const auto& current = tokens_[at];
  if (current.is("{")) return open(at);
  if (current.is("}")) return close(at);
  if (current.is("(") || current.is("[")) ++top.parentheses;
  if ((current.is(")") || current.is("]")) && top.parentheses > 0) --top.parentheses;
  const bool is_access =
      current.is(":") && top.kind == Scope::Kind::Class && at > 0 &&
      (token(at - 1).is("public") || token(at - 1).is("private") || token(at - 1).is("protected"));
  if (is_access) top.is_public = token(at - 1).is("public");
  if ((current.is(";") && top.parentheses == 0) || is_access) top.statement = at + 1;
}

void Reader::open(std::size_t at) {
  if (frames_.size() > kDeepest) throw SourceError(tokens_[at].line, "braces are nested too deep");
  Scope next;
  const auto announced = announced_.find(at);
  if (announced != announced_.end()) next = announced->second;
  const bool is_linkage =
      at > 1 && tokens_[at - 1].kind == Token::Kind::Literal && tokens_[at - 2].is("extern");
  if (is_linkage) next = {.kind = Scope::Kind::Space, .path = frame().path};
  if (next.kind != Scope::Kind::Space) {
    next.path = inside(frame().path, "{" + std::to_string(++blocks_) + "}");
  }
  next.statement = at + 1;
  frames_.push_back(std::move(next));
}

void Reader::close(std::size_t at) {
  // A macro may have opened what is closed here.
  if (frames_.size() > 1) frames_.pop_back();
  if (frames_.back().parentheses == 0) frames_.back().statement = at + 1;
}

std::size_t Reader::end_of_directive(std::size_t at) const {
  for (++at; at < tokens_.size() && tokens_[at].in_directive && !tokens_[at].begins_directive;)
    ++at;
  return at;
}

std::size_t Reader::read_directive(std::size_t at) {
  const auto end = end_of_directive(at);
  const auto name = at + 1 < end ? tokens_[at + 1].text : std::string_view();
  if (branches_.size() > kDeepest) throw SourceError(tokens_[at].line, "#if are nested too deep");
  read_condition(name);
  const auto& argument = token(at + 2);
  if (at + 2 < end && argument.kind == Token::Kind::HeaderName) {
    on_fact({.kind = Fact::Kind::Include,
             .scope = "",
             .name = std::string(argument.text.substr(1, argument.text.size() - 2)),
             .is_quoted = argument.text.starts_with('"'),
             .token = at});
    return end;
  }
  const bool defines = name == "define" && at + 2 < end;
  if (defines) on_declared(argument.text);
  for (auto index = at + (defines ? 3 : 2); index < end;) {
    const bool is_member = token(index - 1).is(".") || token(index - 1).is("->");
    if (!tokens_[index].is_word() || is_member || is_keyword(tokens_[index])) {
      ++index;
      continue;
    }
    const auto chain = chain_at(index);
    on_directive_chain(chain);
    index = chain.tokens.back() + 1;
  }
  return end;
}

void Reader::read_condition(std::string_view name) {
  if (name == "if" || name == "ifdef" || name == "ifndef") {
    branches_.push_back({.before = frames_});
  } else if (branches_.empty()) {
    return;
  } else if (name.starts_with("el")) {
    auto& branch = branches_.back();
    if (!branch.has_alternative) {
      branch.after = frames_;
      ++alternatives_;
    }
    branch.has_alternative = true;
    frames_ = branch.before;
  } else if (name == "endif") {
    if (branches_.back().has_alternative) {
      frames_ = std::move(branches_.back().after);
      --alternatives_;
    }
    branches_.pop_back();
  }
}

std::size_t Reader::read_namespace(std::size_t at) {
  auto name = chain_at(at + 1);
  if (name.tokens.size() == 1 && token(name.tokens[0] + 1).is("=")) {
    const auto target = chain_at(name.tokens[0] + 2);
    if (target.tokens.empty()) return at + 1;
    on_fact({.kind = Fact::Kind::Alias,
             .scope = frame().path,
             .name = std::string(token(name.tokens[0]).text),
             .target = words(target),
             .token = at});
    return target.tokens.back() + 1;
  }
  Scope next{.kind = Scope::Kind::Space, .path = frame().path};
  auto index = at + 1;
  for (; token(index).is_word() || token(index).is("::") || token(index).is("["); ++index) {
    if (token(index).is("namespace") || index > at + kMostWords) return at + 1;
    if (token(index).is("["))
      index = end_of_group(index, "[", "]") - 1;
    else if (token(index).is_word() && !token(index).is("inline"))
      next.path = inside(next.path, std::string(token(index).text));
  }
  if (!token(index).is("{")) return at + 1;
  on_fact({.kind = Fact::Kind::Namespace, .scope = next.path, .name = "", .token = at});
  announced_[index] = std::move(next);
  return index;
}

std::size_t Reader::read_using(std::size_t at) {
  const bool is_directive = token(at + 1).is("namespace");
  const bool names_type = token(at + 1).is("typename");
  const auto name = chain_at(at + (is_directive || names_type ? 2 : 1));
  if (name.tokens.empty()) return at + 1;
  const auto behind = name.tokens.back() + 1;
  Fact fact{.kind = is_directive ? Fact::Kind::Directive : Fact::Kind::Using,
            .scope = frame().path,
            .name = std::string(token(name.tokens.back()).text),
            .target = words(name),
            .token = at};
  if (!is_directive && token(behind).is("=")) {
    const auto start = behind + (token(behind + 1).is("typename") ? 2 : 1);
    const auto target = chain_at(start);
    const bool is_plain = !target.tokens.empty() && token(target.tokens.back() + 1).is(";");
    fact.target = is_plain ? words(target) : QualifiedName{};
    on_fact(fact);
    return behind;
  }
  on_fact(fact);
  return is_directive ? behind : at + 1;
}

std::size_t Reader::end_of_group(std::size_t at, std::string_view open,
                                 std::string_view close) const {
  int depth = 0;
  for (const auto last = at + kLongestHead; at < tokens_.size() && at < last; ++at) {
    if (tokens_[at].is(open)) ++depth;
    if (tokens_[at].is(close) && --depth == 0) return at + 1;
    if (tokens_[at].is(";") || tokens_[at].is("{")) return at;  // it has no end
  }
  return at;
}

void Reader::read_class(std::size_t at) {
  ClassHead head{.name = "", .is_enum = token(at).is("enum"), .is_struct = !token(at).is("class")};
  auto index = at + 1;
  if (head.is_enum && (token(index).is("class") || token(index).is("struct"))) {
    head.is_scoped = true;
    ++index;
  }
  for (; index < tokens_.size() && index < at + kLongestHead; ++index) {
    const auto& current = tokens_[index];
    const auto& before = tokens_[index - 1];
    if (current.is("[")) {
      index = end_of_group(index, "[", "]") - 1;
    } else if (current.is("(") && (before.is("alignas") || before.text.starts_with("__"))) {
      index = end_of_group(index, "(", ")") - 1;
    } else if (current.is("<")) {
      index = end_of_group(index, "<", ">") - 1;  // a specialisation
    } else if (current.is("final")) {
      head.is_final = true;
    } else if (current.is("class") || current.is("struct")) {
      return;
    } else if (current.is_word()) {
      head.name = std::string(current.text);
    } else if (!current.is("::")) {
      break;
    }
  }
  if (token(index).is(";")) return on_declared(head.name);
  if (token(index).is(":")) {
    for (++index; index < at + kLongestHead && !token(index).is("{") && !token(index).is(";");)
      index = read_base(index, head);
  }
  if (!token(index).is("{")) return;
  head.brace = index;
  on_class(head);
  announced_[index] = {.kind = head.is_enum ? Scope::Kind::Enum : Scope::Kind::Class,
                       .head = head,
                       .is_public = head.is_struct};
}

std::size_t Reader::read_base(std::size_t at, ClassHead& head) const {
  const auto& current = token(at);
  if (current.is("<")) return std::max(at + 1, end_of_group(at, "<", ">"));
  if (!current.is_word() || is_keyword(current)) return at + 1;
  const auto chain = chain_at(at);
  head.bases.push_back(words(chain).words);
  return chain.tokens.back() + 1;
}

}  // namespace tessera::adopt
