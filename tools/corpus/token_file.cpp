#include "corpus/token_file.h"

#include "base/private_folder.h"

#include <unistd.h>

#include <algorithm>

namespace tessera::data {
namespace {

constexpr int64_t kHeaderBytes = sizeof(TokenHeader);

/// With a number of the type that tokens of this width are.
template <class F>
void with_width(uint64_t width, F use) {
  if (width == sizeof(uint8_t)) return use(uint8_t{});
  width == sizeof(uint16_t) ? use(uint16_t{}) : use(uint32_t{});
}

}  // namespace

std::optional<TokenHeader> token_header_of(const TextFile& file, const char* caller) {
  TokenHeader header;
  if (file.size() < kHeaderBytes) return std::nullopt;
  file.read(0, kHeaderBytes, reinterpret_cast<char*>(&header), caller);
  const auto width = header.kind.width;
  if (header.magic != TokenHeader::kMagic || (width != 1 && width != 2 && width != 4))
    return std::nullopt;
  return header;
}

uint64_t bytes_of_tokens(const TokenHeader& header) {
  return sizeof(TokenHeader) + header.tokens * header.kind.width;
}

TokenFile::TokenFile(TextFile file, const TokenHeader& header)
    : file_(std::move(file)),
      tokens_(static_cast<int64_t>(header.tokens)),
      width_(header.kind.width) {
  file_.expect_content(kHeaderBytes, header.contents);
}

void TokenFile::read(int64_t first, int64_t count, int64_t* out, const char* caller) const {
  with_width(width_, [&]<class Narrow>(Narrow) {
    std::vector<Narrow> narrow(static_cast<size_t>(count));
    const auto width = static_cast<int64_t>(sizeof(Narrow));
    file_.read(kHeaderBytes + first * width, count * width, reinterpret_cast<char*>(narrow.data()),
               caller);
    std::copy(narrow.begin(), narrow.end(), out);
  });
}

TokenWriter::TokenWriter(int descriptor, const TokenFileKind& kind, std::function<void()> fail)
    : descriptor_(descriptor), fail_(std::move(fail)) {
  const TokenHeader none{.magic = {}};  // the true one comes at the end
  if (ftruncate(descriptor_, 0) != 0) fail_();
  write(&none, sizeof none);
  header_.kind = kind;
}

void TokenWriter::take(c10::ArrayRef<uint32_t> tokens) {
  header_.tokens += tokens.size();
  with_width(header_.kind.width, [&]<class Narrow>(Narrow) { put<Narrow>(tokens); });
}

TokenHeader TokenWriter::finish() {
  header_.contents = contents_.value();
  if (lseek(descriptor_, 0, SEEK_SET) != 0) fail_();
  write(&header_, sizeof header_);
  if (fsync(descriptor_) != 0) fail_();
  return header_;
}

template <class Narrow>
void TokenWriter::put(c10::ArrayRef<uint32_t> tokens) {
  const std::vector<Narrow> narrow(tokens.begin(), tokens.end());
  const auto bytes = narrow.size() * sizeof(Narrow);
  contents_.add({reinterpret_cast<const char*>(narrow.data()), bytes});
  write(narrow.data(), bytes);
}

void TokenWriter::write(const void* bytes, size_t count) {
  if (!write_all(descriptor_, bytes, count)) fail_();
}

}  // namespace tessera::data
