#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::adopt {

/// "a::b::c", or "::a::b::c".
struct Words {
  bool is_global = false;
  std::vector<std::string_view> words = {};
};

/// What a line does to the meaning of names. Scopes are paths: "app" a namespace, "app::{3}" a
/// block in it, "" the global namespace.
struct Fact {
  enum class Kind {
    Namespace,  // scope exists
    Alias,      // namespace name = target;
    Directive,  // using namespace target;
    Using,      // using target; using name = target; no target: something else of that name
    Hookable,   // TESSERA_MODULE(name) stands or will stand there
    Include,    // #include, by the text between the quotes
  };
  Kind kind = Kind::Namespace;
  std::string scope;
  std::string name;
  Words target = {};
  bool is_quoted = false;  // of an Include
  std::size_t token = 0;
};

/// What a name means in a scope.
struct Meaning {
  enum class Way {
    Unknown,
    Written,    // the words before `at` name the namespace
    Directive,  // found through using namespace
    Using,      // found through a using-declaration or an alias of the type
  };
  Way way = Way::Unknown;
  std::string space = {};  // "torch::nn"
  std::string name = {};   // in it: "Linear"
  std::size_t at = 0;      // which of the words is the name
};

/// Looks namespaces and the classes of torch::nn up as C++ does, as far as the facts tell.
class Names {
 public:
  Names();
  void add(const Fact& fact);
  Meaning look_up(const std::string& scope, const Words& words) const;

 private:
  struct Space {
    std::map<std::string, std::string, std::less<>> aliases;  // to namespaces
    std::vector<std::string> directives;
    std::map<std::string, Meaning, std::less<>> usings;
  };
  using Visited = std::set<std::string, std::less<>>;

  void declare(const std::string& path);
  /// A namespace by its name in `space`.
  std::optional<std::string> child(const std::string& space, std::string_view word) const;
  std::optional<std::string> child(const std::string& space, std::string_view word,
                                   Visited& visited) const;
  /// As the first word of a name that stands in `scope`.
  std::optional<std::string> find(const std::string& scope, std::string_view word) const;
  /// The namespace that all of the words name.
  std::optional<std::string> resolve(const std::string& scope, const Words& words) const;
  bool reaches_torch_nn(const std::string& space, Visited& visited) const;
  Meaning look_up_class(std::string scope, std::string_view word) const;

  std::map<std::string, Space, std::less<>> spaces_;
};

}  // namespace tessera::adopt
