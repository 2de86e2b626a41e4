#include "corpus/corpus_cache.h"

#include "base/text.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

// Note [token cache]
// <key>.tokens is a header and the tokens. It is written as <key>.partial and renamed when it is
// whole and on disk. Who writes holds a lock on that very file: the lock goes with the process, the
// name goes with the rename, and so a lock on a file that has lost its name means that somebody
// else has finished.

namespace tessera::data {

namespace {

constexpr const char* kReader = "Corpus";
[[noreturn]] void throw_cache_error(const PrivateFolder& folder, const std::string& name,
                                    const char* what) {
  TORCH_CHECK_VALUE(false, "Corpus: can't ", what, " '", printable(folder.path() + "/" + name),
                    "', where tokens are kept: ", std::strerror(errno),
                    "; name another folder with CorpusOptions::cache");
}

/// The whole file of this name if it is one of this kind.
std::optional<TokenFile> open_whole(const PrivateFolder& folder, const std::string& name,
                                    const TokenFileKind& kind) {
  const OpenFile opened(folder.open_file(name, O_RDONLY));
  if (opened.descriptor() < 0) return std::nullopt;
  TextFile file(opened, folder.path() + "/" + name, TextFile::Access::Mapped, kReader);
  const auto header = token_header_of(file, kReader);
  if (!header || header->kind != kind ||
      static_cast<uint64_t>(file.size()) != bytes_of_tokens(*header))
    return std::nullopt;
  ContentHash contents;
  file.for_each_piece(sizeof *header, kReader,
                      [&contents](std::string_view piece) { contents.add(piece); });
  if (contents.value() != header->contents) return std::nullopt;
  return TokenFile(std::move(file), *header);
}

/// Opens and locks the file that is written to; waits while another process holds it. None: that
/// one has given it its last name meanwhile.
std::optional<int> lock_partial(const PrivateFolder& folder, const std::string& partial) {
  int descriptor = folder.open_file(partial, O_RDWR | O_CREAT);
  if (descriptor < 0 && (errno == ELOOP || errno == EPERM)) {
    folder.remove_file(partial);  // a link, or somebody else's, from before the folder was private
    descriptor = folder.open_file(partial, O_RDWR | O_CREAT);
  }
  if (descriptor < 0) throw_cache_error(folder, partial, "create");
  while (flock(descriptor, LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    const int reason = errno;
    close(descriptor);
    errno = reason;
    throw_cache_error(folder, partial, "lock");
  }
  const OpenFile named(folder.open_file(partial, O_RDONLY));
  struct stat ours{};
  struct stat there{};
  if (named.descriptor() >= 0 && fstat(descriptor, &ours) == 0 &&
      fstat(named.descriptor(), &there) == 0 && ours.st_ino == there.st_ino) {
    return descriptor;
  }
  close(descriptor);
  return std::nullopt;
}

}  // namespace

TokenFile cached_tokens(const PrivateFolder& folder, const TokenFileKind& kind,
                        const std::function<void(const TakeTokens&)>& make) {
  const std::string key = ContentHash::text_of(kind.key);
  const std::string whole = key + ".tokens";
  const std::string partial = key + ".partial";
  while (true) {
    if (auto found = open_whole(folder, whole, kind)) return std::move(*found);
    const std::optional<int> descriptor = lock_partial(folder, partial);
    if (!descriptor) continue;
    const OpenFile locked(*descriptor);
    // Written by somebody between our look and our lock.
    if (auto found = open_whole(folder, whole, kind)) {
      folder.remove_file(partial);
      return std::move(*found);
    }
    try {
      TokenWriter writer(*descriptor, kind, [&] { throw_cache_error(folder, partial, "write"); });
      make([&writer](c10::ArrayRef<uint32_t> tokens) { writer.take(tokens); });
      writer.finish();
      if (!folder.rename_file(partial, whole)) throw_cache_error(folder, partial, "rename");
    } catch (...) {
      folder.remove_file(partial);
      throw;
    }
  }
}

namespace {

constexpr const char* kTableName = "hashes";
constexpr std::string_view kTableMagic = "tessera hashes 1";
constexpr size_t kMostKept = 1 << 16;
// A write within the clock's grain after the last one leaves the times as they are; so a hash is
// kept only of a file that has been at rest for longer than any file system's grain.
constexpr int64_t kRest = 3'000'000'000;

struct HashRecord {
  FileStatus status;
  ContentHash::Value hash;
};
static_assert(sizeof(HashRecord) == 56);

std::string seal_of(const ContentHash& hash) {
  const ContentHash::Value value = hash.value();
  return {reinterpret_cast<const char*>(value.data()), sizeof value};
}

}  // namespace

HashCache::HashCache(const PrivateFolder* folder, int64_t now)
    : folder_(folder), now_(now), known_(load()) {}

int64_t HashCache::clock_now() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

HashCache::Hashes HashCache::load() const {
  Hashes hashes;
  if (folder_ == nullptr) return hashes;
  constexpr size_t kMostBytes = size_t{256} << 20;
  const auto content = folder_->read_file(kTableName, kMostBytes);
  constexpr size_t kSealBytes = sizeof(ContentHash::Value);
  if (!content || !content->starts_with(kTableMagic) ||
      content->size() < kTableMagic.size() + kSealBytes)
    return hashes;
  const std::string_view sealed(content->data(), content->size() - kSealBytes);
  ContentHash seal;
  seal.add(sealed);
  if (!content->ends_with(seal_of(seal))) return hashes;
  for (size_t at = kTableMagic.size(); at + sizeof(HashRecord) <= sealed.size();
       at += sizeof(HashRecord)) {
    HashRecord record;
    std::memcpy(&record, sealed.data() + at, sizeof record);
    hashes[{record.status.device, record.status.inode}] = {record.status, record.hash};
  }
  return hashes;
}

ContentHash::Value HashCache::hash_of(const TextFile& text) {
  const FileStatus& status = text.status();
  const auto key = std::pair(status.device, status.inode);
  const auto found = known_.find(key);
  if (found != known_.end() && found->second.first == status) return found->second.second;
  ContentHash hash;
  text.for_each_piece(0, "Corpus", [&hash](std::string_view piece) { hash.add(piece); });
  ++reads_;
  if (status.size >= kLeastBytes && status.changed + kRest < now_ && status.modified + kRest < now_)
    found_[key] = {status, hash.value()};
  return hash.value();
}

void HashCache::save() {
  if (folder_ == nullptr || found_.empty()) return;
  // Others may have added theirs; of too many, some of those that were not asked for now go.
  for (const auto& [key, entry] : load()) {
    if (found_.size() >= kMostKept) break;
    found_.emplace(key, entry);
  }
  std::string content(kTableMagic);
  for (const auto& [key, entry] : found_) {
    const HashRecord record{.status = entry.first, .hash = entry.second};
    content.append(reinterpret_cast<const char*>(&record), sizeof record);
  }
  ContentHash seal;
  seal.add(content);
  folder_->replace_file(kTableName, content + seal_of(seal));
  found_.clear();
}

}  // namespace tessera::data
