#include "compiler/kernels/cache_entry.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>

namespace tessera::compiler {
namespace {

constexpr std::string_view kSeal = "\ntessera-sealed:";
constexpr size_t kHashSize = 32;

std::optional<std::string> content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string content{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (file.bad()) return std::nullopt;
  return content;
}

}  // namespace

// FNV-1a of 128 bits: nobody else can write to the folder, so chance is the only adversary.
std::string content_hash(const std::string& content) {
  using Wide = unsigned __int128;
  constexpr Wide kPrime = (Wide{1} << 88) + 0x13b;
  Wide hash = (Wide{0x6c62272e07bb0142} << 64) + 0x62b821756295c58d;
  for (const unsigned char byte : content) hash = (hash ^ byte) * kPrime;
  std::string text(kHashSize, '0');
  for (size_t i = kHashSize; i-- > 0; hash >>= 4) text[i] = "0123456789abcdef"[hash & 15];
  return text;
}

namespace cache_entry {

bool seal(const std::string& library) {
  const auto content = content_of(library);
  if (!content) return false;
  std::ofstream file(library, std::ios::binary | std::ios::app);
  file << kSeal << content_hash(*content);
  file.close();
  return file.good() && chmod(library.c_str(), S_IRWXU) == 0;
}

bool is_sound(const std::string& library) {
  struct stat found{};
  if (lstat(library.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) return false;
  if (found.st_uid != geteuid() || (found.st_mode & (S_IWGRP | S_IWOTH)) != 0) return false;
  auto content = content_of(library);
  const size_t seal_size = kSeal.size() + kHashSize;
  if (!content || content->size() < seal_size) return false;
  const std::string seal = content->substr(content->size() - seal_size);
  content->resize(content->size() - seal_size);
  return seal == std::string(kSeal) + content_hash(*content);
}

}  // namespace cache_entry
}  // namespace tessera::compiler
