#pragma once

#include "corpus/content_hash.h"
#include "corpus/text_file.h"

#include <c10/util/ArrayRef.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace tessera::data {

/// What is in a file of tokens: what it was made of, and how wide they are.
struct TokenFileKind {
  ContentHash::Value key;
  uint64_t width = 2;  // bytes per token: 1, 2 or 4

  bool operator==(const TokenFileKind&) const = default;
};

/// How such a file begins.
struct TokenHeader {
  static constexpr std::array<char, 16> kMagic = {'t', 'e', 's', 's', 'e', 'r', 'a', ' ',
                                                  't', 'o', 'k', 'e', 'n', 's', ' ', '1'};
  std::array<char, 16> magic = kMagic;
  TokenFileKind kind{};
  uint64_t tokens = 0;
  ContentHash::Value contents{};  // of all that follows
};
static_assert(sizeof(TokenHeader) == 64);

/// None: the file does not begin like one of tokens. It may yet have fewer of them than it says.
std::optional<TokenHeader> token_header_of(const TextFile& file, const char* caller);
/// How many bytes a file with this header has.
uint64_t bytes_of_tokens(const TokenHeader& header);

/// A file of tokens that is mapped and was found to be whole.
class TokenFile {
 public:
  TokenFile(TextFile file, const TokenHeader& header);

  int64_t tokens() const { return tokens_; }
  void read(int64_t first, int64_t count, int64_t* out, const char* caller) const;

 private:
  TextFile file_;
  int64_t tokens_;
  uint64_t width_;
};

/// Takes tokens as they are made.
using TakeTokens = std::function<void(c10::ArrayRef<uint32_t>)>;

/// Writes such a file.
class TokenWriter {
 public:
  /// Writes over the file. `fail` throws what `errno` says.
  TokenWriter(int descriptor, const TokenFileKind& kind, std::function<void()> fail);

  void take(c10::ArrayRef<uint32_t> tokens);
  /// Until then the file is none of tokens. Returns when it is on disk.
  TokenHeader finish();

 private:
  template <class Narrow>
  void put(c10::ArrayRef<uint32_t> tokens);
  void write(const void* bytes, size_t count);

  int descriptor_;
  std::function<void()> fail_;
  TokenHeader header_;
  ContentHash contents_;
};

}  // namespace tessera::data
