#pragma once

#include "base/private_folder.h"
#include "corpus/content_hash.h"
#include "corpus/text_file.h"
#include "corpus/token_file.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

namespace tessera::data {

/// The tokens of this kind in `folder`. If they are not there, or broken, `make` is called for them
/// in one process of all that ask for them, and the others wait for it; they appear under their
/// name when they are whole.
TokenFile cached_tokens(const PrivateFolder& folder, const TokenFileKind& kind,
                        const std::function<void(const TakeTokens&)>& make);

/// Hashes of files' contents, kept in a folder so that large files are not read at each start. A
/// hash counts as long as device, inode, size, mtime and ctime of its file are the same.
class HashCache {
 public:
  /// Shorter files are read to see whether they are text, so that their hashes cost nothing.
  static constexpr int64_t kLeastBytes = 64 << 10;

  /// Without a folder all files are read. `now` is the time in nanoseconds since 1970.
  explicit HashCache(const PrivateFolder* folder, int64_t now = clock_now());

  ContentHash::Value hash_of(const TextFile& text);
  /// Keeps what was found. Nothing depends on whether it can be kept.
  void save();
  /// How many files were read.
  int64_t reads() const { return reads_; }

 private:
  using Hashes = std::map<std::pair<uint64_t, uint64_t>, std::pair<FileStatus, ContentHash::Value>>;

  static int64_t clock_now();
  Hashes load() const;

  const PrivateFolder* folder_;
  int64_t now_;
  Hashes known_;
  Hashes found_;
  int64_t reads_ = 0;
};

}  // namespace tessera::data
