#pragma once

#include <tessera/corpus.h>

#include "corpus/token_file.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::data {

/// Whether the paths are folders of shards. Throws a ValueError if only some are.
bool are_shards(const std::vector<std::string>& paths);

/// The shards of a folder, which were found to be those of its index.
struct TokenShards {
  ContentHash::Value key;  // of texts and tokenizer
  int64_t bytes = 0;       // of the texts
  std::vector<TokenFile> files;
  std::vector<FileContent> contents;  // of each
};
/// Reads the index, and of each shard the beginning. `opened` others are open already, of other
/// folders. Throws a ValueError that names the file.
TokenShards open_shards(const std::string& folder, const Tokenizer& tokenizer, size_t opened);

}  // namespace tessera::data
