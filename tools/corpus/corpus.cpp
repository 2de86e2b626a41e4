#include <tessera/corpus.h>

#include "base/text.h"
#include "corpus/corpus_cache.h"
#include "corpus/text_file.h"
#include "corpus/tokenizer.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <optional>

namespace tessera::data {

namespace {

/// Programs may hold 65530 maps on Linux, and libtorch needs some, too.
constexpr size_t kMostMaps = 16384;

std::vector<TextFile> open_texts(const std::vector<FoundText>& found) {
  std::vector<TextFile> texts;
  texts.reserve(found.size());
  for (const FoundText& text : found) {
    const auto access =
        texts.size() < kMostMaps ? TextFile::Access::Mapped : TextFile::Access::Direct;
    texts.emplace_back(text.path, access, "Corpus");
  }
  return texts;
}

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

/// Makes the tokens of a file in pieces that end where words do, so that it need not fit in memory.
void encode_text(const TextFile& text, const Bpe& bpe, BpeEncoder& encoder,
                 const ContentHash::Value& expected, const TakeTokens& take) {
  ContentHash hash;
  std::string waiting;
  std::vector<uint32_t> tokens;
  const auto encode = [&](std::string_view piece) {
    tokens.clear();
    encoder.encode(piece, tokens);
    take(tokens);
  };
  text.for_each_piece(0, "Corpus", [&](std::string_view piece) {
    hash.add(piece);
    const size_t cut = bpe.safe_cut(piece);
    if (cut == 0) {
      waiting += piece;
      return;
    }
    encode(waiting.append(piece.substr(0, cut)));
    waiting = piece.substr(cut);
  });
  if (!waiting.empty()) encode(waiting);
  TORCH_CHECK_VALUE(hash.value() == expected, "Corpus: expected '", printable(text.path()),
                    "' to stay as it is while its tokens are made, but it has changed; try again");
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
  const TokenFileKind kind{.key = key.value(),
                           .width = bpe.parts().bytes.size() <= 1U << 16 ? 2U : 4U};
  return cached_tokens(folder, kind, [&](const TakeTokens& take) {
    BpeEncoder encoder(bpe);
    for (size_t i = 0; i < texts.size(); ++i)
      encode_text(texts[i], bpe, encoder, contents[i], take);
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

struct Corpus::Impl {
  Tokenizer tokenizer;
  int64_t tokens = 0;
  int64_t files = 0;
  int64_t bytes = 0;
  std::string fingerprint;
  std::vector<FileContent> contents;
  std::vector<TextFile> texts;    // whose bytes are the tokens
  std::vector<int64_t> starts;    // first token of each
  std::optional<TokenFile> made;  // instead, by a BPE tokenizer

  void take_tokens(const std::vector<ContentHash::Value>& hashes,
                   const std::optional<PrivateFolder>& cache);

  void read(int64_t first, int64_t count, int64_t* out, const char* caller) const {
    if (count == 0) return;
    if (made) {
      made->read(first, count, out, caller);
      return;
    }
    std::string piece;
    auto text = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), first) -
                                    starts.begin() - 1);
    for (; count > 0; ++text) {
      const int64_t offset = first - starts[text];
      const int64_t here = std::min(count, texts[text].size() - offset);
      piece.resize(static_cast<size_t>(here));
      texts[text].read(offset, here, piece.data(), caller);
      out = std::transform(piece.begin(), piece.end(), out,
                           [](char c) { return static_cast<unsigned char>(c); });
      first += here;
      count -= here;
    }
  }
};

/// Of the BPE instead of bytes. The texts are not needed any more.
void Corpus::Impl::take_tokens(const std::vector<ContentHash::Value>& hashes,
                               const std::optional<PrivateFolder>& cache) {
  const std::optional<PrivateFolder> temporary =
      cache ? std::nullopt : std::optional(temporary_cache());
  made.emplace(tokens_of(texts, hashes, tokenizer.impl_->bpe, tokenizer.impl_->checksum,
                         cache ? *cache : *temporary));
  tokens = made->tokens();
  texts.clear();
  starts.clear();
}

Corpus::Corpus(const std::vector<std::string>& paths, Tokenizer tokenizer, CorpusOptions options) {
  TORCH_CHECK_VALUE(!paths.empty(), "Corpus: expected at least one file or folder, got none");
  const FoundTexts found = find_texts(paths);
  auto impl = std::make_shared<Impl>();
  impl->tokenizer = std::move(tokenizer);
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
