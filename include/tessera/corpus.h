#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Texts as rows of tokens. A library of its own, which the trainer reads with: link
/// tessera::corpus.
namespace tessera::data {

/// Text to numbers and back. Copies share what they are made of; safe to use from several threads.
class Tokenizer {
 public:
  /// One token per byte, 256 of them.
  Tokenizer();
  /// A tokenizer.json of Hugging Face's `tokenizers` with a byte-level BPE, as GPT-2's and its
  /// relatives. Gives the very tokens of that package without those that its post-processor adds,
  /// or refuses the file by the name of what it does not know.
  static Tokenizer from_file(const std::string& path);

  /// Every token is below this.
  int64_t vocabulary() const;
  /// Bytes that are no UTF-8 become U+FFFD first, as in Python's `errors="replace"`, unless each
  /// byte is a token.
  std::vector<int64_t> encode(std::string_view text) const;
  /// The same of text that others wrote: what looks like a special token, "<|im_end|>", is text
  /// like any other.
  std::vector<int64_t> encode_ordinary(std::string_view text) const;
  /// The added token of this content, e.g. "<|im_end|>"; none if there is none.
  std::optional<int64_t> added_token(std::string_view content) const;
  std::string decode(c10::ArrayRef<int64_t> tokens) const;

  bool is_bytes() const;
  /// "bytes", or the file's name with a checksum of what is in it: goes into checkpoints.
  std::string name() const;

 private:
  friend class Corpus;
  struct Impl;
  explicit Tokenizer(std::shared_ptr<const Impl> impl);

  std::shared_ptr<const Impl> impl_;  // null: bytes
};

struct CorpusOptions {
  /// Folder for tokens made by a BPE tokenizer and for hashes of large files, of this user alone.
  /// Empty: tessera/tokens in $XDG_CACHE_HOME or in ~/.cache; without either of them, one in the
  /// temporary folder. Where that can't be used, a warning says so and nothing is kept.
  std::string cache = {};
};

struct ShardOptions {
  int64_t shard_tokens = int64_t{1} << 27;  // in a file, at most; of GPT-2's tokenizer 256 MiB
};

/// A file of a corpus.
struct FileContent {
  std::string name;  // inside of the folder that was named
  std::string hash;  // of its bytes
};

/// The tokens of text files as one row, mapped into memory, not read. Copies share the mapping;
/// safe to use from several threads.
class Corpus {
 public:
  /// Files and folders as they come, the text files of a folder in order of path, each file once.
  /// Left out of folders are hidden files and folders, `build`, `runs`, `node_modules`, what
  /// `tessera train` and `tessera report` have written (folders with a metrics.jsonl, report.html),
  /// links to folders, empty files and those that are not text (a zero byte in their first 64 KiB);
  /// a file that is named is taken as it is. A BPE tokenizer's tokens are made once, by one of the
  /// processes that ask for them at the same time, into a file in the cache that is found again by
  /// the contents of files and tokenizer.
  /// Or folders of write_shards, whose tokens are neither made nor read as a whole, and which are
  /// of this tokenizer. A shard that is missing, cut short or another one's is an error.
  explicit Corpus(const std::vector<std::string>& paths, Tokenizer tokenizer = {},
                  CorpusOptions options = {});

  /// Writes the tokens that the corpus of these texts would have into files of a new folder, which
  /// appears when it is whole: shards, an index of them and the tokenizer. `tokenizer`: "bytes", or
  /// the path of a tokenizer.json.
  static void write_shards(const std::vector<std::string>& paths, const std::string& tokenizer,
                           const std::string& folder, const ShardOptions& options = {});
  /// The tokenizer that write_shards was given for this folder, as it lies there: "bytes", or the
  /// path of its tokenizer.json. None: the folder has no shards.
  static std::optional<std::string> tokenizer_of_shards(const std::string& folder);

  int64_t tokens() const;
  int64_t files() const;
  int64_t bytes() const;
  const Tokenizer& tokenizer() const;
  /// Of names, contents and tokenizer: says whether a position in it still means the same.
  std::string fingerprint() const;
  /// What the fingerprint was made of, in order: says which file differs.
  const std::vector<FileContent>& contents() const;

  /// [count], int64. Throws if the file has changed since it was opened.
  at::Tensor read(int64_t first, int64_t count) const;
  /// Rows of `length` tokens; row i begins at token `indices[i] * stride`. [indices, length], int64
  at::Tensor windows(c10::ArrayRef<int64_t> indices, int64_t stride, int64_t length) const;

 private:
  struct Impl;

  std::shared_ptr<const Impl> impl_;
};

}  // namespace tessera::data
