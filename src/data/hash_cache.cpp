#include "data/hash_cache.h"

#include <array>
#include <cstring>

namespace tessera::data {

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
