#pragma once

#include "corpus/bpe.h"

#include <string>

namespace tessera::data {

struct TokenizerFile {
  BpeParts parts;
  std::string checksum;  // of the whole file
};

/// Reads a tokenizer.json. Throws a ValueError that names the file and what in it is not
/// understood.
TokenizerFile read_tokenizer_file(const std::string& path);

}  // namespace tessera::data
