#pragma once

#include "adopt/names.h"
#include "adopt/tokens.h"

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace tessera::adopt {

/// A name of one or more words: std::vector, ::torch::nn::Linear.
struct NameTokens {
  bool is_global = false;
  std::vector<std::size_t> tokens = {};  // its words
};

/// The beginning of a class that has a body, or of an enum.
struct ClassHead {
  std::string name;
  bool is_enum = false;
  bool is_scoped = false;  // enum class
  bool is_struct = false;
  bool is_final = false;
  std::vector<std::vector<std::string_view>> bases = {};  // words of their names
  std::size_t brace = 0;
};

/// Goes through the tokens of a file and follows its scopes; classes that derive from it do
/// something about what it finds. Of `#if … #else …` both sides are read, each in the scopes that
/// were open at the #if.
class Reader {
 public:
  virtual ~Reader() = default;

 protected:
  explicit Reader(const std::vector<Token>& tokens) : tokens_(tokens) {}

  struct Scope {
    enum class Kind { Space, Class, Enum, Block };
    Kind kind = Kind::Block;
    std::string path = {};
    ClassHead head = {};
    int parentheses = 0;        // that are open in it
    std::size_t statement = 0;  // the first token of the one that is read
    bool is_public = true;      // in a class
  };

  void read();

  virtual void on_fact(const Fact& /*fact*/) {}
  virtual void on_class(const ClassHead& /*head*/) {}
  /// `class Name;`, `#define Name`, an enumerator.
  virtual void on_declared(std::string_view /*name*/) {}
  virtual void on_chain(const NameTokens& /*chain*/) {}
  /// A name in a directive that is no #include.
  virtual void on_directive_chain(const NameTokens& /*chain*/) {}

  const std::vector<Token>& tokens() const { return tokens_; }
  /// Also for places that do not exist: a mark that equals no other.
  const Token& token(std::size_t index) const;
  const Scope& frame() const { return frames_.back(); }
  bool is_in_alternative() const { return alternatives_ > 0; }  // behind an #else
  QualifiedName words(const NameTokens& chain) const;

 private:
  struct Branch {
    std::vector<Scope> before;
    std::vector<Scope> after = {};  // the first alternative
    bool has_alternative = false;
  };

  std::size_t read_token(std::size_t at);  // returns the next one
  std::size_t read_word(std::size_t at);
  std::size_t read_directive(std::size_t at);
  void read_condition(std::string_view name);
  std::size_t read_namespace(std::size_t at);
  std::size_t read_using(std::size_t at);
  void read_class(std::size_t at);
  std::size_t read_base(std::size_t at, ClassHead& head) const;
  std::size_t end_of_directive(std::size_t at) const;
  std::size_t end_of_group(std::size_t at, std::string_view open, std::string_view close) const;
  NameTokens chain_at(std::size_t at) const;
  void open(std::size_t at);
  void close(std::size_t at);
  void mark(std::size_t at);

  const std::vector<Token>& tokens_;
  std::vector<Scope> frames_ = {Scope{.kind = Scope::Kind::Space}};
  std::map<std::size_t, Scope> announced_;  // by their brace
  std::vector<Branch> branches_;
  int alternatives_ = 0;
  std::size_t blocks_ = 0;
};

}  // namespace tessera::adopt
