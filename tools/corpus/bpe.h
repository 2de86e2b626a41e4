#pragma once

#include "corpus/pre_tokenizer.h"

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tessera::data {

/// Text that is one token wherever it stands, e.g. "<|endoftext|>".
struct AddedToken {
  std::string content;
  uint32_t token = 0;
};

/// Finds added tokens in texts: the first one, and of several that begin at its place the longest.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens = {});

  struct Match {
    size_t begin;
    size_t end;
    uint32_t token;
  };
  std::optional<Match> find(std::string_view text, size_t from) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  std::vector<AddedToken> tokens_;  // longest first
  std::array<bool, 256> begins_{};  // whether one begins with this byte
};

struct BpeMerge {
  uint32_t left;
  uint32_t right;
  uint32_t result;
};

/// What a tokenizer file says, in terms of bytes.
struct BpeParts {
  std::vector<std::string> bytes;  // of each token; none: no token has this number
  std::array<uint32_t, 256> byte_tokens{};
  std::vector<BpeMerge> merges;  // the first ones first
  bool ignore_merges = false;    // a word that is a token becomes that token at once
  std::unordered_map<std::string, uint32_t> words;  // with ignore_merges: tokens by bytes
  AddedTokens added_first;                          // found in the text as a whole
  AddedTokens added_then;                           // found in what the first ones left
  AddedTokens ordinary_first, ordinary_then;        // of these, those that are not special
  std::vector<PreTokenizerStep> steps;
};

/// Byte-level BPE: a word starts as the tokens of its bytes; of all neighbours that may merge,
/// those that come first in the list of merges do, the leftmost first, until none are left.
class Bpe {
 public:
  explicit Bpe(BpeParts parts);

  const BpeParts& parts() const { return parts_; }

  struct Merged {
    uint32_t rank = kNever;
    uint32_t token = 0;
  };
  static constexpr uint32_t kNever = ~uint32_t{0};
  /// What becomes of two neighbours; rank kNever: they stay.
  Merged merge_of(uint32_t left, uint32_t right) const;

  /// The last place where `text` can be cut so that its parts make the tokens of the whole,
  /// whatever follows the text; 0 if there is none.
  size_t safe_cut(std::string_view text) const;

 private:
  struct Slot {
    uint64_t pair;
    Merged merged;
  };

  BpeParts parts_;
  std::vector<Slot> slots_;  // open addressing; a power of two, at most half full
  bool can_cut_ = false;
};

/// Makes tokens of texts and remembers words it has met. For one thread.
class BpeEncoder {
 public:
  explicit BpeEncoder(const Bpe& bpe) : bpe_(bpe) {}

  /// Appends the text's tokens. `has_special` false: special tokens are text like any other.
  void encode(std::string_view text, std::vector<uint32_t>& tokens, bool has_special = true);

 private:
  struct Symbol {
    uint32_t token;
    int32_t previous;
    int32_t next;
  };
  struct WordHash {
    using is_transparent = void;
    size_t operator()(std::string_view word) const { return std::hash<std::string_view>{}(word); }
  };

  void encode_words(std::string_view text, std::vector<uint32_t>& tokens);
  void encode_word(std::string_view word, std::vector<uint32_t>& tokens);
  void merge_word(std::string_view word, std::vector<uint32_t>& tokens);
  void offer(int32_t left);

  const Bpe& bpe_;
  std::unordered_map<std::string, std::vector<uint32_t>, WordHash, std::equal_to<>> known_;
  std::vector<Symbol> symbols_;
  std::vector<uint64_t> queue_;  // a heap of rank << 32 | place of the left one
};

}  // namespace tessera::data
