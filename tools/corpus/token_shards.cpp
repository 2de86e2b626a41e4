#include "corpus/token_shards.h"

#include "base/private_folder.h"
#include "base/text.h"
#include "corpus/corpus_cache.h"
#include "corpus/tokenizer.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <stdexcept>

// Note [token shards]
// A folder of shards has an index, token-shards.json, the tokenizer, and the shards: files of
// tokens as those of the cache. The key of each is made of that of all (tokenizer, names and
// contents of the texts, size of shards) and its number, so that a shard of other texts, or one
// under another's name, is told without reading it. The folder is written under another name and
// renamed: an index says that all shards were on disk.

namespace tessera::data {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kFormat = "tessera token shards 1";
constexpr const char* kTokenizerName = "tokenizer.json";

bool has_index(const std::string& folder) {
  std::error_code ignored;
  return fs::exists(fs::path(folder) / kShardIndex, ignored);
}

std::string name_of_shard(size_t number) {
  constexpr size_t kDigits = 5;
  const auto digits = std::to_string(number);
  const auto zeros = kDigits - std::min(kDigits, digits.size());
  return "shard-" + std::string(zeros, '0') + digits + ".tokens";
}

ContentHash::Value key_of_shard(const ContentHash::Value& all, size_t number) {
  ContentHash key;
  key.add_number(all[0]);
  key.add_number(all[1]);
  key.add_number(number);
  return key.value();
}

/// What the index tells.
struct ShardIndex {
  struct Row {
    int64_t tokens = 0;
    ContentHash::Value hash{};
  };
  TokenFileKind kind;  // of all shards together
  std::string tokenizer;
  int64_t bytes = 0;
  std::vector<Row> shards = {};
};

json to_json(const ShardIndex& index) {
  auto rows = json::array();
  for (size_t i = 0; i < index.shards.size(); ++i)
    rows.push_back({{"file", name_of_shard(i)},
                    {"tokens", index.shards[i].tokens},
                    {"hash", index.shards[i].hash}});
  return {{"format", kFormat},     {"tokenizer", index.tokenizer}, {"bytes", index.bytes},
          {"key", index.kind.key}, {"width", index.kind.width},    {"shards", std::move(rows)}};
}

[[noreturn]] void throw_damage(const std::string& field, const char* expected) {
  throw std::invalid_argument(field + " has to be " + expected);
}

/// get<uint64_t> would take fractions and negative numbers for others.
uint64_t number_in(const json& value, const char* field,
                   uint64_t most = std::numeric_limits<uint64_t>::max()) {
  if (!value.is_number_unsigned()) throw_damage(field, "a whole number");
  const auto number = value.get_ref<const json::number_unsigned_t&>();
  if (number > most) throw_damage(field, "smaller");
  return number;
}

ContentHash::Value hash_in(const json& value, const char* field) {
  ContentHash::Value hash{};
  if (!value.is_array() || value.size() != hash.size()) throw_damage(field, "two numbers");
  for (size_t i = 0; i < hash.size(); ++i) hash[i] = number_in(value[i], field);
  return hash;
}

/// Throws json::exception or std::invalid_argument where a field is not as to_json makes it.
/// Copies no value of the file, which may be nested as deeply as its writer liked.
ShardIndex index_from(const json& file) {
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max() / 64;
  ShardIndex index{.kind = {.key = hash_in(file.at("key"), "key"),
                            .width = number_in(file.at("width"), "width")},
                   .tokenizer = file.at("tokenizer").get_ref<const std::string&>(),
                   .bytes = static_cast<int64_t>(number_in(file.at("bytes"), "bytes", kMost))};
  if (index.kind.width != 1 && index.kind.width != 2 && index.kind.width != 4)
    throw_damage("width", "1, 2 or 4");
  const auto& rows = file.at("shards");
  if (!rows.is_array() || rows.empty()) throw_damage("shards", "a list of them");
  uint64_t left = kMost;
  for (const auto& row : rows) {
    const auto tokens = number_in(row.at("tokens"), "tokens", left);
    if (tokens == 0) throw_damage("tokens", "above 0");
    left -= tokens;
    index.shards.push_back(
        {.tokens = static_cast<int64_t>(tokens), .hash = hash_in(row.at("hash"), "hash")});
  }
  return index;
}

ShardIndex read_index(const std::string& folder) {
  const auto path = (fs::path(folder) / kShardIndex).string();
  const auto file = json::parse(read_whole_file(path, "Corpus"), nullptr,
                                /*allow_exceptions=*/false);
  const auto format = file.find("format");
  TORCH_CHECK_VALUE(file.is_object() && format != file.end() && format->is_string() &&
                        format->get_ref<const std::string&>() == kFormat,
                    "Corpus: expected the index that tessera tokenize writes in '", printable(path),
                    "' (", kFormat, "), got something else; write the folder anew, or name texts");
  try {
    return index_from(file);
  } catch (const std::exception& error) {
    TORCH_CHECK_VALUE(false, "Corpus: expected the index that tessera tokenize writes in '",
                      printable(path), "', but it is damaged: ", printable(error.what()),
                      "; write the folder anew");
  }
}

TokenFile open_shard(const std::string& path, const ShardIndex& index, size_t number,
                     TextFile::Access access) {
  const auto& row = index.shards[number];
  const TokenHeader expected{
      .kind = {.key = key_of_shard(index.kind.key, number), .width = index.kind.width},
      .tokens = static_cast<uint64_t>(row.tokens),
      .contents = row.hash};
  TextFile file(path, access, "Corpus");
  const auto header = token_header_of(file, "Corpus");
  const bool is_short = file.size() < static_cast<int64_t>(sizeof expected);
  TORCH_CHECK_VALUE(
      is_short || (header && header->kind == expected.kind && header->tokens == expected.tokens &&
                   header->contents == expected.contents),
      "Corpus: expected in '", printable(path), "' shard ", number, " of ", index.shards.size(),
      " that ", kShardIndex, " beside it lists, got ",
      header ? "a shard of other texts, or another one" : "no shard",
      "; folders of shards are copied as a whole, or written anew");
  const auto bytes = bytes_of_tokens(expected);
  TORCH_CHECK_VALUE(
      static_cast<uint64_t>(file.size()) == bytes, "Corpus: expected ", bytes, " bytes in '",
      printable(path), "', ", row.tokens, " tokens, got ", file.size(), "; the shard was ",
      is_short || static_cast<uint64_t>(file.size()) < bytes ? "cut short" : "written to",
      ": copy it again, or write the folder anew");
  return {std::move(file), expected};
}

std::string checksum_in(const std::string& tokenizer) {
  return tokenizer.substr(tokenizer.rfind('#') + 1);  // of "bytes" all of it
}

/// As a message shows it: whoever wrote the index may have given it a name without end.
std::string shown(const std::string& tokenizer) {
  constexpr size_t kMost = 200;
  return printable(tokenizer.substr(0, kMost)) + (tokenizer.size() > kMost ? "..." : "");
}

/// A folder that is written: under another name until it is whole.
class NewFolder {
 public:
  explicit NewFolder(const std::string& path) : path_(fs::absolute(path).lexically_normal()) {
    if (!path_.has_filename()) path_ = path_.parent_path();  // it ended by a slash
    std::error_code error;
    const auto type = fs::symlink_status(path_, error).type();
    const bool is_folder = type == fs::file_type::directory;
    TORCH_CHECK_VALUE(
        type == fs::file_type::none ||  // making it says why
            type == fs::file_type::not_found || (is_folder && fs::is_empty(path_, error)),
        "Corpus::write_shards: expected a new folder, got '", printable(path), "', which is there ",
        is_folder ? "and not empty" : "and no folder", "; name another, or remove it");
    fs::create_directories(path_.parent_path(), error);
    const auto now = std::chrono::system_clock::now().time_since_epoch().count();
    made_ = path_.parent_path() / ("." + path_.filename().string() + "-" +
                                   std::to_string(getpid()) + "-" + std::to_string(now));
    TORCH_CHECK_VALUE(fs::create_directory(made_, error),
                      "Corpus::write_shards: expected a folder that can be made at '",
                      printable(path), "', but making one beside it failed: ", error.message());
  }
  ~NewFolder() {
    std::error_code ignored;
    if (!made_.empty()) fs::remove_all(made_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  fs::path file(const std::string& name) const { return made_ / name; }
  void finish() {
    std::error_code error;
    sync(made_);
    fs::rename(made_, path_, error);
    TORCH_CHECK_VALUE(!error, "Corpus::write_shards: expected to rename what was written to '",
                      printable(path_.string()), "', got: ", error.message());
    made_.clear();
    sync(path_.parent_path());
  }

 private:
  /// The names in it. Some file systems know no such call for folders.
  static void sync(const fs::path& folder) {
    const OpenFile opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    const bool is_done = opened.descriptor() >= 0 && fsync(opened.descriptor()) == 0;
    TORCH_CHECK_VALUE(is_done || errno == EINVAL || errno == EACCES,
                      "Corpus::write_shards: expected the folder '", printable(folder.string()),
                      "' on disk, got: ", std::strerror(errno));
  }

  fs::path path_, made_;
};

[[noreturn]] void throw_write_error(const fs::path& path) {
  TORCH_CHECK_VALUE(false, "Corpus::write_shards: expected to write '", printable(path.string()),
                    "', got: ", std::strerror(errno));
}

void write_file(const fs::path& path, const std::string& content) {
  const OpenFile file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.descriptor() < 0 || !write_all(file.descriptor(), content.data(), content.size()) ||
      fsync(file.descriptor()) != 0)
    throw_write_error(path);
}

/// One shard after the other, each full before the next begins.
class ShardWriter {
 public:
  ShardWriter(const NewFolder& folder, ShardIndex& index, int64_t most)
      : folder_(folder), index_(index), most_(static_cast<uint64_t>(most)) {}

  void take(c10::ArrayRef<uint32_t> tokens) {
    while (!tokens.empty()) {
      if (!writer_) begin();
      const auto count = std::min(tokens.size(), most_ - written_);
      writer_->take(tokens.slice(0, count));
      tokens = tokens.slice(count);
      written_ += count;
      if (written_ == most_) end();
    }
  }

  void finish() {
    if (writer_) end();
  }

 private:
  void begin() {
    path_ = folder_.file(name_of_shard(index_.shards.size()));
    file_ = std::make_unique<OpenFile>(
        open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (file_->descriptor() < 0) throw_write_error(path_);
    const TokenFileKind kind{.key = key_of_shard(index_.kind.key, index_.shards.size()),
                             .width = index_.kind.width};
    writer_.emplace(file_->descriptor(), kind, [this] { throw_write_error(path_); });
    written_ = 0;
  }

  void end() {
    const auto header = writer_->finish();
    index_.shards.push_back(
        {.tokens = static_cast<int64_t>(header.tokens), .hash = header.contents});
    writer_.reset();
    file_.reset();
  }

  const NewFolder& folder_;
  ShardIndex& index_;
  size_t most_, written_ = 0;
  fs::path path_;
  std::unique_ptr<OpenFile> file_;
  std::optional<TokenWriter> writer_;  // of the shard that is not full
};

}  // namespace

bool are_shards(const std::vector<std::string>& paths) {
  const auto count = std::ranges::count_if(paths, has_index);
  if (count == 0) return false;
  const auto text = std::ranges::find_if_not(paths, has_index);
  TORCH_CHECK_VALUE(text == paths.end(),
                    "Corpus: expected texts, or folders of token shards, got both: '",
                    printable(*std::ranges::find_if(paths, has_index)), "' has a ", kShardIndex,
                    ", '", printable(text == paths.end() ? "" : *text),
                    "' has none; write shards of all by tessera tokenize");
  return true;
}

TokenShards open_shards(const std::string& folder, const Tokenizer& tokenizer, size_t opened) {
  const auto index = read_index(folder);
  TORCH_CHECK_VALUE(checksum_in(index.tokenizer) == checksum_in(tokenizer.name()),
                    "Corpus: expected the tokenizer that the shards in '", printable(folder),
                    "' are of, ", shown(index.tokenizer), ", got ", shown(tokenizer.name()),
                    "; it lies beside them, or write shards by the other one");
  TokenShards shards{.key = index.kind.key, .bytes = index.bytes, .files = {}, .contents = {}};
  for (size_t i = 0; i < index.shards.size(); ++i) {
    const auto name = name_of_shard(i);
    shards.files.push_back(
        open_shard((fs::path(folder) / name).string(), index, i, access_to(opened + i)));
    ContentHash hash;  // of what the whole header says
    for (const auto number : key_of_shard(index.kind.key, i)) hash.add_number(number);
    for (const auto number : index.shards[i].hash) hash.add_number(number);
    shards.contents.push_back({.name = name, .hash = hash.text()});
  }
  return shards;
}

std::optional<std::string> Corpus::tokenizer_of_shards(const std::string& folder) {
  if (!has_index(folder)) return std::nullopt;
  const auto tokenizer = read_index(folder).tokenizer;
  if (tokenizer == "bytes") return tokenizer;
  return (fs::path(folder) / kTokenizerName).string();
}

void Corpus::write_shards(const std::vector<std::string>& paths, const std::string& tokenizer,
                          const std::string& folder, const ShardOptions& options) {
  TORCH_CHECK_VALUE(options.shard_tokens >= 1,
                    "Corpus::write_shards: expected shards of at least 1 token, got ",
                    options.shard_tokens);
  TORCH_CHECK_VALUE(std::ranges::none_of(paths, has_index),
                    "Corpus::write_shards: expected texts, got a folder of shards");
  const bool is_bytes = tokenizer == "bytes";
  auto made_by = is_bytes ? Tokenizer() : Tokenizer::from_file(tokenizer);
  const auto name = made_by.name();
  NewFolder made(folder);
  if (!is_bytes) {
    const auto copied = made.file(kTokenizerName);
    write_file(copied, read_whole_file(tokenizer, "Corpus::write_shards"));
    made_by = Tokenizer::from_file(copied.string());
    TORCH_CHECK_VALUE(checksum_in(made_by.name()) == checksum_in(name),
                      "Corpus::write_shards: expected '", printable(tokenizer),
                      "' to stay as it is while it is copied, but it has changed; try again");
  }
  const auto found = find_texts(paths);
  auto texts = open_texts(found.files);
  ContentHash key;
  key.add_text(checksum_in(made_by.name()));
  key.add_number(static_cast<uint64_t>(options.shard_tokens));
  HashCache hash_cache(nullptr);
  std::vector<ContentHash::Value> hashes;
  int64_t bytes = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    hashes.push_back(hash_cache.hash_of(texts[i]));
    texts[i].expect_content(0, hashes[i]);
    key.add_text(found.files[i].name);
    for (const auto number : hashes[i]) key.add_number(number);
    bytes += texts[i].size();
  }
  TORCH_CHECK_VALUE(bytes > 0, "Corpus::write_shards: expected text in ", format_list(paths),
                    ", found none; left out: ", found.left_out.text());
  const auto* bpe = is_bytes ? nullptr : &made_by.impl_->bpe;
  ShardIndex index{.kind = {.key = key.value(), .width = token_width(bpe)},
                   .tokenizer = printable(name),
                   .bytes = bytes};
  ShardWriter writer(made, index, options.shard_tokens);
  TextEncoder encoder(bpe);
  for (size_t i = 0; i < texts.size(); ++i)
    encoder.encode(texts[i], hashes[i],
                   [&](c10::ArrayRef<uint32_t> tokens) { writer.take(tokens); });
  writer.finish();
  write_file(made.file(kShardIndex), to_json(index).dump(1) + "\n");
  made.finish();
}

}  // namespace tessera::data
