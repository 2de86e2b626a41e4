#pragma once

#include <tessera/corpus.h>

#include "corpus/bpe.h"
#include "corpus/text_file.h"
#include "corpus/token_file.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

struct Tokenizer::Impl {
  Bpe bpe;
  std::string file_name;
  std::string checksum;
};

/// The bytes in a token of this tokenizer's files; null: of bytes.
uint64_t token_width(const Bpe* bpe);

/// Makes the tokens of files in pieces that end where words do, so that they need not fit in
/// memory.
class TextEncoder {
 public:
  /// Null: bytes.
  explicit TextEncoder(const Bpe* bpe);
  /// Throws a ValueError if the text's content is not the `expected` one (any more).
  void encode(const TextFile& text, const ContentHash::Value& expected, const TakeTokens& take);

 private:
  void encode_piece(std::string_view piece, const TakeTokens& take);

  const Bpe* bpe_;
  std::optional<BpeEncoder> encoder_;
  std::vector<uint32_t> tokens_;
};

}  // namespace tessera::data
