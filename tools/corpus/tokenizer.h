#pragma once

#include <tessera/corpus.h>

#include "corpus/bpe.h"

#include <string>

namespace tessera::data {

struct Tokenizer::Impl {
  Bpe bpe;
  std::string file_name;
  std::string checksum;
};

}  // namespace tessera::data
