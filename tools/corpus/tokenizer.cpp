#include "corpus/tokenizer.h"

#include <tessera/corpus.h>

#include "corpus/tokenizer_file.h"

#include <c10/util/Exception.h>

#include <filesystem>

namespace tessera::data {

Tokenizer::Tokenizer() = default;

Tokenizer::Tokenizer(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Tokenizer Tokenizer::from_file(const std::string& path) {
  TokenizerFile file = read_tokenizer_file(path);
  return Tokenizer(std::make_shared<const Impl>(
      Impl{Bpe(std::move(file.parts)), std::filesystem::path(path).filename().string(),
           std::move(file.checksum)}));
}

bool Tokenizer::is_bytes() const { return impl_ == nullptr; }

int64_t Tokenizer::vocabulary() const {
  return is_bytes() ? 256 : static_cast<int64_t>(impl_->bpe.parts().bytes.size());
}

std::vector<int64_t> Tokenizer::encode(std::string_view text) const {
  if (is_bytes()) {
    std::vector<int64_t> bytes(text.size());
    for (size_t i = 0; i < text.size(); ++i) bytes[i] = static_cast<unsigned char>(text[i]);
    return bytes;
  }
  std::vector<uint32_t> tokens;
  BpeEncoder(impl_->bpe).encode(text, tokens);
  return {tokens.begin(), tokens.end()};
}

std::vector<int64_t> Tokenizer::encode_ordinary(std::string_view text) const {
  if (is_bytes()) return encode(text);
  std::vector<uint32_t> tokens;
  BpeEncoder(impl_->bpe).encode(text, tokens, /*has_special=*/false);
  return {tokens.begin(), tokens.end()};
}

std::optional<int64_t> Tokenizer::added_token(std::string_view content) const {
  if (is_bytes()) return std::nullopt;
  const auto& parts = impl_->bpe.parts();
  for (const auto* added : {&parts.added_first, &parts.added_then}) {
    for (const auto& one : added->tokens()) {
      if (one.content == content) return one.token;
    }
  }
  return std::nullopt;
}

std::string Tokenizer::decode(c10::ArrayRef<int64_t> tokens) const {
  const int64_t end = vocabulary();
  std::string text;
  for (const int64_t token : tokens) {
    TORCH_CHECK_VALUE(token >= 0 && token < end, "Tokenizer::decode: expected tokens from 0 to ",
                      end - 1, ", got ", token, "; was it made by the tokenizer ", name(), "?");
    if (is_bytes()) {
      text += static_cast<char>(token);
    } else {
      text += impl_->bpe.parts().bytes[static_cast<size_t>(token)];
    }
  }
  return text;
}

std::string Tokenizer::name() const {
  return is_bytes() ? "bytes" : impl_->file_name + "#" + impl_->checksum;
}

}  // namespace tessera::data
