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
struct QualifiedName {
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
  QualifiedName target = {};
  bool is_quoted = false;  // of an Include
  std::size_t token = 0;
};

/// What a name means in a scope.
struct LookupResult {
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
  LookupResult look_up(const std::string& scope, const QualifiedName& words) const;

 private:
  struct Space {
    std::map<std::string, std::string, std::less<>> aliases;  // to namespaces
    std::vector<std::string> directives;
    std::map<std::string, LookupResult, std::less<>> usings;
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
  std::optional<std::string> resolve(const std::string& scope, const QualifiedName& words) const;
  bool reaches_torch_nn(const std::string& space, Visited& visited) const;
  LookupResult look_up_class(std::string scope, std::string_view word) const;

  std::map<std::string, Space, std::less<>> spaces_;
};

/// The classes of torch::nn that tessera::nn has: "Linear". The build reads them from the public
/// headers (module_names.cmake).
const std::set<std::string, std::less<>>& module_names();

}  // namespace tessera::adopt
