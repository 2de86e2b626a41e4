#pragma once

#include "base/private_folder.h"
#include "data/content_hash.h"
#include "data/text_file.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::data {

/// What is in a file of tokens: which texts and tokenizer they were made of, and how wide they are.
struct TokenFileKind {
  ContentHash::Value key;
  uint64_t width = 2;  // bytes per token: 2 or 4
};

/// A file of tokens that is mapped and was found to be whole.
class TokenFile {
 public:
  TokenFile(TextFile file, uint64_t width) : file_(std::move(file)), width_(width) {}

  int64_t tokens() const;
  void read(int64_t first, int64_t count, int64_t* out, const char* caller) const;

 private:
  TextFile file_;
  uint64_t width_;
};

/// Takes tokens as they are made.
using TakeTokens = std::function<void(const std::vector<uint32_t>&)>;

/// The tokens of this kind in `folder`. If they are not there, or broken, `make` is called for them
/// in one process of all that ask for them, and the others wait for it; they appear under their
/// name when they are whole.
TokenFile cached_tokens(const PrivateFolder& folder, const TokenFileKind& kind,
                        const std::function<void(const TakeTokens&)>& make);

}  // namespace tessera::data
