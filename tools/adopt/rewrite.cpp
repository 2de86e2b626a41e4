#include "adopt/rewrite.h"

#include "adopt/names.h"
#include "adopt/reader.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::adopt {

inline constexpr const char* kFunctions = "functions stay torch's";
inline constexpr const char* kCast =
    "finds torch's modules and Tessera's; calls through what it returns run no hooks";
inline constexpr const char* kImplPointer =
    "calls through a reference or pointer to the Impl class run no hooks: take the holder, or its "
    "::Impl";
inline constexpr const char* kInDirective = "in a macro or condition: change it by hand";
inline constexpr const char* kOddMacro = "expected the name of a class in it";
inline constexpr const char* kOwnName =
    "the program has something of this name: write torch::nn:: or tessera::nn:: before the one "
    "that is meant";
inline constexpr const char* kUnknownSpace =
    "what nn is stands in a header that was not found: name that file, too";

/// Whether a name found through `using namespace torch::nn` is one of torch's that stay.
bool is_class_of_torch(std::string_view name);

/// Collects what stays, one note for each reason.
class NoteCollector {
 public:
  void stays(int line, const std::string& name, const std::string& reason);
  void by_hand(int line, const std::string& name, const std::string& reason);
  /// A class or function of torch::nn that tessera::nn does not have.
  void torchs(int line, const std::string& name, bool is_base);

  std::vector<Note> notes() const;  // in the order of their lines

 private:
  void add(int line, bool needs_hand, const std::string& name, const std::string& reason);

  std::map<std::string, Note> by_reason_;
};

namespace {

constexpr std::array<std::string_view, 6> kBases = {"Module",   "Cloneable",      "AnyModule",
                                                    "AnyValue", "NamedAnyModule", "ModuleHolder"};

constexpr std::size_t kMostNames = 6;  // in one note

bool is_options(std::string_view name) { return name.ends_with("Options"); }

}  // namespace

bool is_class_of_torch(std::string_view name) {
  return std::ranges::find(kBases, name) != kBases.end() ||
         (is_options(name) && module_names().contains(name.substr(
                                  0, name.size() - std::string_view("Options").size())));
}

void NoteCollector::stays(int line, const std::string& name, const std::string& reason) {
  add(line, false, name, reason);
}

void NoteCollector::by_hand(int line, const std::string& name, const std::string& reason) {
  add(line, true, name, reason);
}

void NoteCollector::torchs(int line, const std::string& name, bool is_base) {
  const auto whole = "torch::nn::" + name;
  if (name == "ModuleHolder" && is_base) {
    by_hand(line, whole, "a holder that is written out runs no hooks: use TESSERA_MODULE");
  } else if (std::ranges::find(kBases, name) != kBases.end()) {
    stays(line, whole, "modules of both libraries derive from it and fit into it");
  } else if (is_options(name)) {
    stays(line, whole, "options are torch's, tessera::nn takes them");
  } else {
    by_hand(line, whole, "tessera::nn has no such name");
  }
}

void NoteCollector::add(int line, bool needs_hand, const std::string& name,
                        const std::string& reason) {
  auto& note = by_reason_.try_emplace(reason, Note{.line = line}).first->second;
  note.needs_hand = needs_hand;
  note.reason = reason;
  ++note.places;
  if (note.names.size() > kMostNames || std::ranges::count(note.names, name) > 0) return;
  note.names.push_back(note.names.size() < kMostNames ? name : "…");
}

std::vector<Note> NoteCollector::notes() const {
  std::vector<Note> notes;
  for (const auto& [reason, note] : by_reason_) notes.push_back(note);
  std::ranges::stable_sort(notes, {}, &Note::line);
  return notes;
}

namespace {

constexpr std::string_view kOurs = "tessera::nn";
constexpr std::string_view kTorchs = "torch::nn";

bool has_module(std::string_view name) { return module_names().contains(name); }

/// "Linear" of "LinearImpl"; empty: no name of an Impl class.
std::string_view without_impl(std::string_view name) {
  return name.size() > 4 && name.ends_with("Impl") ? name.substr(0, name.size() - 4) : "";
}

bool is_macro(const Token& token) {
  return token.is("TORCH_MODULE") || token.is("TORCH_MODULE_IMPL") || token.is("TESSERA_MODULE");
}

class Rewriter : public Reader {
 public:
  Rewriter(const Source& source, const std::function<bool(const std::string&)>& is_holder)
      : Reader(source.tokens), source_(source), is_holder_(is_holder) {
    for (const auto* each : closure_of(source))
      own_names_.insert(each->outline.own_names.begin(), each->outline.own_names.end());
  }

  Rewrite run() {
    read();
    std::ranges::stable_sort(edits_, {}, &Edit::offset);
    return {std::move(edits_), notes_.notes()};
  }

 private:
  /// What the name stands in: the template that it is an argument of.
  enum class Use { Other, Cast, Access, Make, Share };

  void on_fact(const Fact& fact) override {
    if (fact.kind != Fact::Kind::Include) return learn(source_, fact);
    const auto found = source_.includes.find(fact.token);
    if (found != source_.includes.end()) learn_all(*found->second);
  }

  void learn(const Source& source, const Fact& fact) {
    names_.add(fact);
    if (fact.kind != Fact::Kind::Hookable) return;
    const auto& line = source.outline.modules.at(fact.name);
    const bool becomes = source.is_given && line.obstacle.empty();
    if (line.macro == "TESSERA_MODULE" || becomes) hookable_.insert(line.impl);
  }

  void learn_all(const Source& source) {
    if (!learned_.insert(&source).second) return;
    for (const auto& fact : source.outline.facts) {
      if (fact.kind != Fact::Kind::Include) {
        learn(source, fact);
      } else if (const auto found = source.includes.find(fact.token);
                 found != source.includes.end()) {
        learn_all(*found->second);
      }
    }
  }

  void on_class(const ClassHead& head) override {
    const auto facts = source_.outline.classes.find(head.name);
    if (head.is_enum || facts == source_.outline.classes.end()) return;
    if (facts->second.forwards + facts->second.alternative_forwards == 0) return;
    for (const auto& base : head.bases) {
      const auto meaning = names_.look_up(frame().path, {.words = base});
      if (meaning.space != kTorchs || (meaning.name != "Module" && meaning.name != "Cloneable"))
        continue;
      if (is_holder_(head.name)) return;
      const auto name = without_impl(head.name);
      const std::string holder(name.empty() ? head.name : name);
      notes_.by_hand(
          token(head.brace).line, (head.is_struct ? "struct " : "class ") + head.name,
          "a module without a holder, whose calls run no hooks: " +
              (name.empty() ? "name it " + holder + "Impl and add" : std::string("add")) +
              " TESSERA_MODULE(" + holder + ")");
      return;
    }
  }

  void on_chain(const NameTokens& chain) override {
    const auto first = chain.tokens[0];
    const bool is_plain = !chain.is_global && chain.tokens.size() == 1;
    if (is_plain && (token(first).is("TORCH_MODULE") || token(first).is("TORCH_MODULE_IMPL")))
      return rewrite_macro(first);
    if (is_plain && token(first).is("TESSERA_MODULE"))
      hookable_.insert(std::string(token(first + 2).text) + "Impl");
    if (token(first - 1).is("(") && is_macro(token(first - 2))) return;  // its name
    const auto meaning = names_.look_up(frame().path, words(chain));
    const bool is_torchs = meaning.way != LookupResult::Way::Directive ||
                           has_module(meaning.name) || has_module(without_impl(meaning.name)) ||
                           is_class_of_torch(meaning.name);
    if (meaning.space == kTorchs && is_torchs) return on_torch(chain, meaning);
    const auto& last = token(chain.tokens.back());
    if (meaning.space.starts_with(kTorchs))
      return notes_.stays(last.line, meaning.space + "::" + meaning.name, kFunctions);
    if (const std::string impl(last.text); hookable_.contains(impl)) return on_own_impl(chain);
    const bool may_be_torchs =
        meaning.way == LookupResult::Way::Unknown && chain.tokens.size() > 1 &&
        token(chain.tokens[chain.tokens.size() - 2]).is("nn") && has_module(last.text);
    if (may_be_torchs) notes_.by_hand(last.line, spelled(chain), kUnknownSpace);
  }

  void on_directive_chain(const NameTokens& chain) override {
    const auto& last = token(chain.tokens.back());
    const auto meaning = names_.look_up(frame().path, words(chain));
    const bool is_module = meaning.space == kTorchs && meaning.way == LookupResult::Way::Written &&
                           has_module(meaning.name);
    const bool holds = chain.tokens.size() == 1 && is_macro(last) && !last.is("TESSERA_MODULE");
    if (is_module || holds) notes_.by_hand(last.line, spelled(chain), kInDirective);
  }

  void on_torch(const NameTokens& chain, const LookupResult& meaning) {
    const auto at = chain.tokens[meaning.at];
    if (has_module(meaning.name)) {
      on_module(chain, meaning);
    } else if (has_module(without_impl(meaning.name))) {
      on_torch_impl(chain, meaning);
    } else {
      notes_.torchs(token(at).line, meaning.name, is_base(chain));
    }
  }

  void on_module(const NameTokens& chain, const LookupResult& meaning) {
    const auto at = chain.tokens[meaning.at];
    const bool is_cast = use_of(chain) == Use::Cast && meaning.at + 1 == chain.tokens.size();
    if (is_cast) {
      notes_.stays(token(at).line, "as<" + spelled(chain) + ">", kCast);
      // The using-declaration that gave the name will speak of tessera::nn's.
      if (meaning.way == LookupResult::Way::Using)
        replace(chain.tokens[0], at, std::string(kTorchs) + "::" + meaning.name);
    } else if (meaning.way == LookupResult::Way::Directive && own_names_.contains(meaning.name)) {
      notes_.by_hand(token(at).line, meaning.name, kOwnName);
    } else {
      qualify(chain, meaning);
    }
  }

  void on_torch_impl(const NameTokens& chain, const LookupResult& meaning) {
    const auto use = use_of(chain);
    const auto at = chain.tokens[meaning.at];
    const bool is_last = meaning.at + 1 == chain.tokens.size();
    const std::string name(without_impl(meaning.name));
    if (is_last && (use == Use::Access || use == Use::Make)) {
      if (meaning.way == LookupResult::Way::Using) {
        replace(chain.tokens[0], at, std::string(kOurs) + "::" + name + "::Impl");
      } else if (meaning.way != LookupResult::Way::Directive ||
                 !own_names_.contains(meaning.name)) {
        if (qualify(chain, meaning)) replace(at, at, name + "::Impl");
      }
    } else if (is_last && is_pointed_to(chain)) {
      notes_.by_hand(token(at).line, spelled(chain), kImplPointer);
    }
  }

  /// The Impl class of a module of the program, where it is hookable.
  void on_own_impl(const NameTokens& chain) {
    const auto use = use_of(chain);
    const auto at = chain.tokens.back();
    if (use == Use::Access || use == Use::Make) {
      replace(at, at, std::string(without_impl(token(at).text)) + "::Impl");
    } else if (is_pointed_to(chain)) {
      notes_.by_hand(token(at).line, spelled(chain), kImplPointer);
    }
  }

  void rewrite_macro(std::size_t at) {
    const auto& name = token(at + 2);
    const bool is_call = token(at + 1).is("(") && name.is_word();
    const auto found =
        is_call ? source_.outline.modules.find(name.text) : source_.outline.modules.end();
    const auto what =
        std::string(token(at).text) + (is_call ? "(" + std::string(name.text) + ")" : "");
    if (found == source_.outline.modules.end())
      return notes_.by_hand(token(at).line, what, kOddMacro);
    const auto& line = found->second;
    if (!line.obstacle.empty()) return notes_.by_hand(token(at).line, what, line.obstacle);
    hookable_.insert(line.impl);
    replace(at, at, "TESSERA_MODULE");
    if (!token(at).is("TORCH_MODULE_IMPL")) return;
    if (are_neighbours(at + 2, at + 5)) {
      const auto from = offset(at + 2) + name.text.size();
      edits_.push_back({from, offset(at + 5) - from, ""});
    } else {
      replace(at + 3, at + 3, "");
      replace(at + 4, at + 4, "");
    }
  }

  /// tessera::nn:: instead of what names torch::nn. False where that is not possible.
  bool qualify(const NameTokens& chain, const LookupResult& meaning) {
    if (meaning.way == LookupResult::Way::Using) return true;  // the using-declaration is rewritten
    const auto first = chain.tokens[0];
    if (meaning.way == LookupResult::Way::Directive) {
      edits_.push_back({offset(first), 0, std::string(kOurs) + "::"});
      return true;
    }
    const bool ends_in_nn = meaning.at == 2 && token(chain.tokens[1]).is("nn");
    if (ends_in_nn) {
      replace(first, first, "tessera");
      return true;
    }
    const auto last = chain.tokens[meaning.at - 1];
    if (!are_neighbours(first, last)) {
      notes_.by_hand(token(first).line, spelled(chain), "its name has a comment or a line's end");
      return false;
    }
    replace(first, last, std::string(kOurs));
    return true;
  }

  std::size_t offset(std::size_t at) const {
    return static_cast<std::size_t>(token(at).text.data() - source_.text.data());
  }

  /// Whether nothing but spaces stands between the tokens.
  bool are_neighbours(std::size_t first, std::size_t last) const {
    for (auto at = first; at < last; ++at) {
      const auto end = offset(at) + token(at).text.size();
      const auto between = std::string_view(source_.text).substr(end, offset(at + 1) - end);
      if (between.find_first_not_of(' ') != std::string_view::npos) return false;
    }
    return true;
  }

  void replace(std::size_t first, std::size_t last, std::string text) {
    const auto end = offset(last) + token(last).text.size();
    edits_.push_back({offset(first), end - offset(first), std::move(text)});
  }

  std::size_t begin(const NameTokens& chain) const {
    return chain.tokens[0] - (chain.is_global ? 1 : 0);
  }

  Use use_of(const NameTokens& chain) const {
    const auto at = begin(chain);
    if (!token(at - 1).is("<")) return Use::Other;
    const auto& name = token(at - 2);
    const auto& before = token(at - 3);
    const bool is_member = before.is(".") || before.is("->") || before.is("template");
    if (is_member && name.is("as")) return Use::Cast;
    if (is_member && (name.is("at") || name.is("get") || name.is("ptr"))) return Use::Access;
    if (name.is("make_shared") || name.is("allocate_shared")) return Use::Make;
    return name.is("shared_ptr") ? Use::Share : Use::Other;
  }

  bool is_pointed_to(const NameTokens& chain) const {
    const auto& behind = token(chain.tokens.back() + 1);
    return behind.is("&") || behind.is("*") || use_of(chain) == Use::Share;
  }

  bool is_base(const NameTokens& chain) const {
    const auto& before = token(begin(chain) - 1);
    return before.is(":") || before.is("public");
  }

  std::string spelled(const NameTokens& chain) const {
    std::string text;
    for (const auto at : chain.tokens)
      text += (text.empty() ? "" : "::") + std::string(token(at).text);
    return text;
  }

  const Source& source_;
  const std::function<bool(const std::string&)>& is_holder_;
  Names names_;
  std::set<std::string, std::less<>> own_names_;
  std::set<std::string> hookable_;  // Impl classes
  std::set<const Source*> learned_;
  std::vector<Edit> edits_;
  NoteCollector notes_;
};

}  // namespace

Rewrite rewrite(const Source& source, const std::function<bool(const std::string&)>& is_holder) {
  return Rewriter(source, is_holder).run();
}

std::string apply_edits(const std::string& text, const std::vector<Edit>& edits) {
  std::string changed;
  std::size_t at = 0;
  for (const auto& edit : edits) {
    changed.append(text, at, edit.offset - at).append(edit.text);
    at = edit.offset + edit.length;
  }
  return changed.append(text, at);
}

}  // namespace tessera::adopt
