#include <tessera/corpus.h>

#include "base/text.h"
#include "corpus/corpus_cache.h"
#include "corpus/text_file.h"
#include "corpus/token_shards.h"
#include "corpus/tokenizer.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <optional>

namespace tessera::data {

namespace {

/// Where tokens and hashes are kept. None if it can't be used: then a warning says so, once per
/// process, unless the user has chosen it and tokens are to be kept there.
std::optional<PrivateFolder> open_cache(const std::string& chosen, bool keeps_tokens) {
  const std::string path = chosen.empty() ? cache_path("tokens") : chosen;
  std::string why;
  auto folder = PrivateFolder::open(path, why);
  if (folder) return folder;
  TORCH_CHECK_VALUE(chosen.empty() || !keeps_tokens,
                    "Corpus: expected a folder of this user alone at '", printable(path),
                    "', where tokens are kept, but ", why,
                    "; name another folder with CorpusOptions::cache");
  static std::atomic<bool> has_warned = false;
  if (!has_warned.exchange(true)) {
    TORCH_WARN("Corpus: the cache folder '", printable(path), "' is not used: ", why,
               "; tokens and hashes of texts are made anew in every process. Make it a folder of "
               "your own, private (chmod 700), or name another one by XDG_CACHE_HOME");
  }
  return std::nullopt;
}

TokenFile tokens_of(const std::vector<TextFile>& texts,
                    const std::vector<ContentHash::Value>& contents, const Bpe& bpe,
                    const std::string& checksum, const PrivateFolder& folder) {
  ContentHash key;
  key.add_text(checksum);
  for (size_t i = 0; i < texts.size(); ++i) {
    key.add_number(static_cast<uint64_t>(texts[i].size()));
    key.add_number(contents[i][0]);
    key.add_number(contents[i][1]);
  }
  const TokenFileKind kind{.key = key.value(), .width = token_width(&bpe)};
  return cached_tokens(folder, kind, [&](const TakeTokens& take) {
    TextEncoder encoder(&bpe);
    for (size_t i = 0; i < texts.size(); ++i) encoder.encode(texts[i], contents[i], take);
  });
}

PrivateFolder temporary_cache() {
  std::string why;
  auto folder = PrivateFolder::make_temporary(why);
  TORCH_CHECK_VALUE(folder, "Corpus: expected a folder for tokens, but ", why,
                    "; name one with CorpusOptions::cache, or set XDG_CACHE_HOME or TMPDIR to a "
                    "folder that can be written to");
  return std::move(*folder);
}

}  // namespace

uint64_t token_width(const Bpe* bpe) {
  if (bpe == nullptr) return sizeof(uint8_t);
  return bpe->parts().bytes.size() <= 1U << 16 ? sizeof(uint16_t) : sizeof(uint32_t);
}

TextEncoder::TextEncoder(const Bpe* bpe) : bpe_(bpe) {
  if (bpe != nullptr) encoder_.emplace(*bpe);
}

void TextEncoder::encode_piece(std::string_view piece, const TakeTokens& take) {
  tokens_.clear();
  if (encoder_) {
    encoder_->encode(piece, tokens_);
  } else {
    for (const char byte : piece) tokens_.push_back(static_cast<unsigned char>(byte));
  }
  take(tokens_);
}

void TextEncoder::encode(const TextFile& text, const ContentHash::Value& expected,
                         const TakeTokens& take) {
  ContentHash hash;
  std::string waiting;
  text.for_each_piece(0, "Corpus", [&](std::string_view piece) {
    hash.add(piece);
    const size_t cut = bpe_ == nullptr ? piece.size() : bpe_->safe_cut(piece);
    if (cut == 0) {
      waiting += piece;
      return;
    }
    encode_piece(waiting.append(piece.substr(0, cut)), take);
    waiting = piece.substr(cut);
  });
  if (!waiting.empty()) encode_piece(waiting, take);
  TORCH_CHECK_VALUE(hash.value() == expected, "Corpus: expected '", printable(text.path()),
                    "' to stay as it is while its tokens are made, but it has changed; try again");
}

struct Corpus::Impl {
  Tokenizer tokenizer;
  int64_t tokens = 0;
  int64_t files = 0;
  int64_t bytes = 0;
  std::string fingerprint;
  std::vector<FileContent> contents;
  std::vector<TextFile> texts;  // whose bytes are the tokens
  std::vector<TokenFile> made;  // instead: of a BPE tokenizer, or shards
  std::vector<int64_t> starts;  // first token of each text, or of each made

  void take_tokens(const std::vector<ContentHash::Value>& hashes,
                   const std::optional<PrivateFolder>& cache);

  void take_shards(const std::vector<std::string>& folders);

  void read(int64_t first, int64_t count, int64_t* out, const char* caller) const {
    auto place = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), first) -
                                     starts.begin() - 1);
    for (; count > 0; ++place) {
      const int64_t offset = first - starts[place];
      const int64_t here = std::min(count, size_of(place) - offset);
      read_within(place, offset, here, out, caller);
      out += here;
      first += here;
      count -= here;
    }
  }

 private:
  int64_t size_of(size_t place) const {
    return made.empty() ? texts[place].size() : made[place].tokens();
  }

  void read_within(size_t place, int64_t first, int64_t count, int64_t* out,
                   const char* caller) const {
    if (!made.empty()) {
      made[place].read(first, count, out, caller);
      const auto vocabulary = tokenizer.vocabulary();
      TORCH_CHECK_VALUE(
          std::all_of(out, out + count, [&](auto token) { return token < vocabulary; }), caller,
          ": expected tokens below ", vocabulary,
          ", those of the tokenizer, got others: a shard is damaged; copy it again, "
          "or write the folder anew");
      return;
    }
    std::string piece(static_cast<size_t>(count), '\0');
    texts[place].read(first, count, piece.data(), caller);
    std::transform(piece.begin(), piece.end(), out,
                   [](char c) { return static_cast<unsigned char>(c); });
  }
};

/// Of the BPE instead of bytes. The texts are not needed any more.
void Corpus::Impl::take_tokens(const std::vector<ContentHash::Value>& hashes,
                               const std::optional<PrivateFolder>& cache) {
  const std::optional<PrivateFolder> temporary =
      cache ? std::nullopt : std::optional(temporary_cache());
  made.push_back(tokens_of(texts, hashes, tokenizer.impl_->bpe, tokenizer.impl_->checksum,
                           cache ? *cache : *temporary));
  tokens = made[0].tokens();
  texts.clear();
  starts = {0};
}

void Corpus::Impl::take_shards(const std::vector<std::string>& folders) {
  ContentHash all;
  std::vector<ContentHash::Value> seen;
  for (const auto& folder : folders) {
    auto shards = open_shards(folder, tokenizer, made.size());
    if (std::ranges::count(seen, shards.key) > 0) continue;  // each once, as files
    seen.push_back(shards.key);
    bytes += shards.bytes;
    for (size_t i = 0; i < shards.files.size(); ++i) {
      starts.push_back(tokens);
      tokens += shards.files[i].tokens();
      all.add_text(shards.contents[i].hash);
      made.push_back(std::move(shards.files[i]));
      contents.push_back(std::move(shards.contents[i]));
    }
  }
  files = std::ssize(made);
  fingerprint = all.text();
}

Corpus::Corpus(const std::vector<std::string>& paths, Tokenizer tokenizer, CorpusOptions options) {
  TORCH_CHECK_VALUE(!paths.empty(), "Corpus: expected at least one file or folder, got none");
  auto impl = std::make_shared<Impl>();
  impl->tokenizer = std::move(tokenizer);
  if (are_shards(paths)) {
    impl->take_shards(paths);
    impl_ = std::move(impl);
    return;
  }
  const FoundTexts found = find_texts(paths);
  const bool is_bpe = !impl->tokenizer.is_bytes();
  impl->texts = open_texts(found.files);
  for (const TextFile& text : impl->texts) {
    impl->starts.push_back(impl->bytes);
    impl->bytes += text.size();
  }
  TORCH_CHECK_VALUE(impl->bytes > 0, "Corpus: expected text in ", format_list(paths),
                    ", found none; left out: ", found.left_out.text(),
                    "; a file that is named itself is taken as it is");
  impl->files = static_cast<int64_t>(impl->texts.size());
  impl->tokens = impl->bytes;
  const bool is_large = std::ranges::any_of(
      impl->texts, [](const TextFile& text) { return text.size() >= HashCache::kLeastBytes; });
  const auto cache =
      is_bpe || is_large ? open_cache(options.cache, is_bpe) : std::optional<PrivateFolder>();
  HashCache hash_cache(cache ? &*cache : nullptr);
  std::vector<ContentHash::Value> hashes;
  ContentHash fingerprint;
  fingerprint.add_text(is_bpe ? impl->tokenizer.impl_->checksum : "bytes");
  for (size_t i = 0; i < impl->texts.size(); ++i) {
    hashes.push_back(hash_cache.hash_of(impl->texts[i]));
    impl->texts[i].expect_content(0, hashes[i]);
    impl->contents.push_back({found.files[i].name, ContentHash::text_of(hashes[i])});
    fingerprint.add_text(found.files[i].name);
    fingerprint.add_number(static_cast<uint64_t>(impl->texts[i].size()));
    fingerprint.add_text(impl->contents[i].hash);
  }
  hash_cache.save();
  impl->fingerprint = fingerprint.text();
  if (is_bpe) impl->take_tokens(hashes, cache);
  impl_ = std::move(impl);
}

int64_t Corpus::tokens() const { return impl_->tokens; }
int64_t Corpus::files() const { return impl_->files; }
int64_t Corpus::bytes() const { return impl_->bytes; }
const Tokenizer& Corpus::tokenizer() const { return impl_->tokenizer; }
std::string Corpus::fingerprint() const { return impl_->fingerprint; }
const std::vector<FileContent>& Corpus::contents() const { return impl_->contents; }

at::Tensor Corpus::read(int64_t first, int64_t count) const {
  TORCH_CHECK_VALUE(first >= 0 && count >= 0 && first <= tokens() && count <= tokens() - first,
                    "Corpus::read: expected a part of the corpus of ", tokens(), " tokens, got ",
                    count, " from ", first, " on");
  at::Tensor row = at::empty({count}, at::kLong);
  impl_->read(first, count, row.mutable_data_ptr<int64_t>(), "Corpus::read");
  return row;
}

at::Tensor Corpus::windows(c10::ArrayRef<int64_t> indices, int64_t stride, int64_t length) const {
  TORCH_CHECK_VALUE(stride >= 1 && length >= 1,
                    "Corpus::windows: expected a stride and a length of at least 1, got ", stride,
                    " and ", length);
  TORCH_CHECK_VALUE(length <= tokens(), "Corpus::windows: expected rows of at most the corpus's ",
                    tokens(), " tokens, got a length of ", length,
                    "; take a shorter one, or more text");
  const int64_t last = (tokens() - length) / stride;
  for (const int64_t index : indices) {
    TORCH_CHECK_VALUE(index >= 0 && index <= last, "Corpus::windows: expected indices from 0 to ",
                      last, " (", tokens(), " tokens, stride ", stride, ", length ", length,
                      "), got ", index);
  }
  at::Tensor rows = at::empty({static_cast<int64_t>(indices.size()), length}, at::kLong);
  int64_t* row = rows.mutable_data_ptr<int64_t>();
  for (const int64_t index : indices) {
    impl_->read(index * stride, length, row, "Corpus::windows");
    row += length;
  }
  return rows;
}

}  // namespace tessera::data
