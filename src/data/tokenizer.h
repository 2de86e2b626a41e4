#pragma once

#include <tessera/data.h>

#include "data/bpe.h"

#include <string>

namespace tessera::data {

struct Tokenizer::Impl {
  Bpe bpe;
  std::string file_name;
  std::string checksum;
};

}  // namespace tessera::data
