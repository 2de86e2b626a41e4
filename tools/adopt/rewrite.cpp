#include "adopt/rewrite.h"

#include "adopt/module_names.h"
#include "adopt/reader.h"
#include "adopt/remarks.h"

#include <algorithm>
#include <optional>

namespace tessera::adopt {
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
    return {std::move(edits_), remarks_.notes()};
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
      remarks_.by_hand(
          token(head.brace).line, (head.is_struct ? "struct " : "class ") + head.name,
          "a module without a holder, whose calls run no hooks: " +
              (name.empty() ? "name it " + holder + "Impl and add" : std::string("add")) +
              " TESSERA_MODULE(" + holder + ")");
      return;
    }
  }

  void on_chain(const Chain& chain) override {
    const auto first = chain.tokens[0];
    const bool is_plain = !chain.is_global && chain.tokens.size() == 1;
    if (is_plain && (token(first).is("TORCH_MODULE") || token(first).is("TORCH_MODULE_IMPL")))
      return rewrite_macro(first);
    if (is_plain && token(first).is("TESSERA_MODULE"))
      hookable_.insert(std::string(token(first + 2).text) + "Impl");
    if (token(first - 1).is("(") && is_macro(token(first - 2))) return;  // its name
    const auto meaning = names_.look_up(frame().path, words(chain));
    const bool is_torchs = meaning.way != Meaning::Way::Directive || has_module(meaning.name) ||
                           has_module(without_impl(meaning.name)) ||
                           is_class_of_torch(meaning.name);
    if (meaning.space == kTorchs && is_torchs) return on_torch(chain, meaning);
    const auto& last = token(chain.tokens.back());
    if (meaning.space.starts_with(kTorchs))
      return remarks_.stays(last.line, meaning.space + "::" + meaning.name, kFunctions);
    if (const std::string impl(last.text); hookable_.contains(impl)) return on_own_impl(chain);
    const bool may_be_torchs = meaning.way == Meaning::Way::Unknown && chain.tokens.size() > 1 &&
                               token(chain.tokens[chain.tokens.size() - 2]).is("nn") &&
                               has_module(last.text);
    if (may_be_torchs) remarks_.by_hand(last.line, spelled(chain), kUnknownSpace);
  }

  void on_directive_chain(const Chain& chain) override {
    const auto& last = token(chain.tokens.back());
    const auto meaning = names_.look_up(frame().path, words(chain));
    const bool is_module = meaning.space == kTorchs && meaning.way == Meaning::Way::Written &&
                           has_module(meaning.name);
    const bool holds = chain.tokens.size() == 1 && is_macro(last) && !last.is("TESSERA_MODULE");
    if (is_module || holds) remarks_.by_hand(last.line, spelled(chain), kInDirective);
  }

  void on_torch(const Chain& chain, const Meaning& meaning) {
    const auto at = chain.tokens[meaning.at];
    if (has_module(meaning.name)) {
      on_module(chain, meaning);
    } else if (has_module(without_impl(meaning.name))) {
      on_torch_impl(chain, meaning);
    } else {
      remarks_.torchs(token(at).line, meaning.name, is_base(chain));
    }
  }

  void on_module(const Chain& chain, const Meaning& meaning) {
    const auto at = chain.tokens[meaning.at];
    const bool is_cast = use_of(chain) == Use::Cast && meaning.at + 1 == chain.tokens.size();
    if (is_cast) {
      remarks_.stays(token(at).line, "as<" + spelled(chain) + ">", kCast);
      // The using-declaration that gave the name will speak of tessera::nn's.
      if (meaning.way == Meaning::Way::Using)
        replace(chain.tokens[0], at, std::string(kTorchs) + "::" + meaning.name);
    } else if (meaning.way == Meaning::Way::Directive && own_names_.contains(meaning.name)) {
      remarks_.by_hand(token(at).line, meaning.name, kOwnName);
    } else {
      qualify(chain, meaning);
    }
  }

  void on_torch_impl(const Chain& chain, const Meaning& meaning) {
    const auto use = use_of(chain);
    const auto at = chain.tokens[meaning.at];
    const bool is_last = meaning.at + 1 == chain.tokens.size();
    const std::string name(without_impl(meaning.name));
    if (is_last && (use == Use::Access || use == Use::Make)) {
      if (meaning.way == Meaning::Way::Using) {
        replace(chain.tokens[0], at, std::string(kOurs) + "::" + name + "::Impl");
      } else if (meaning.way != Meaning::Way::Directive || !own_names_.contains(meaning.name)) {
        if (qualify(chain, meaning)) replace(at, at, name + "::Impl");
      }
    } else if (is_last && is_pointed_to(chain)) {
      remarks_.by_hand(token(at).line, spelled(chain), kImplPointer);
    }
  }

  /// The Impl class of a module of the program, where it is hookable.
  void on_own_impl(const Chain& chain) {
    const auto use = use_of(chain);
    const auto at = chain.tokens.back();
    if (use == Use::Access || use == Use::Make) {
      replace(at, at, std::string(without_impl(token(at).text)) + "::Impl");
    } else if (is_pointed_to(chain)) {
      remarks_.by_hand(token(at).line, spelled(chain), kImplPointer);
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
      return remarks_.by_hand(token(at).line, what, kOddMacro);
    const auto& line = found->second;
    if (!line.obstacle.empty()) return remarks_.by_hand(token(at).line, what, line.obstacle);
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
  bool qualify(const Chain& chain, const Meaning& meaning) {
    if (meaning.way == Meaning::Way::Using) return true;  // the using-declaration is rewritten
    const auto first = chain.tokens[0];
    if (meaning.way == Meaning::Way::Directive) {
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
      remarks_.by_hand(token(first).line, spelled(chain), "its name has a comment or a line's end");
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

  std::size_t begin(const Chain& chain) const {
    return chain.tokens[0] - (chain.is_global ? 1 : 0);
  }

  Use use_of(const Chain& chain) const {
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

  bool is_pointed_to(const Chain& chain) const {
    const auto& behind = token(chain.tokens.back() + 1);
    return behind.is("&") || behind.is("*") || use_of(chain) == Use::Share;
  }

  bool is_base(const Chain& chain) const {
    const auto& before = token(begin(chain) - 1);
    return before.is(":") || before.is("public");
  }

  std::string spelled(const Chain& chain) const {
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
  Remarks remarks_;
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
