#include "corpus/tokenizer_file.h"

#include "base/text.h"
#include "corpus/content_hash.h"
#include "corpus/pre_tokenizer.h"
#include "corpus/text_file.h"
#include "corpus/unicode_classes.h"

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace tessera::data {

/// Throws a ValueError: the tokenizer file `path` has something that is not understood.
[[noreturn]] void refuse_tokenizer(const std::string& path, const std::string& what);

/// The field of this name, or null if there is none.
const nlohmann::json& json_field(const nlohmann::json& object, const char* name);
/// The field as a truth value; `otherwise` if there is none or it is null.
bool json_flag(const nlohmann::json& object, const char* name, bool otherwise,
               const std::string& path);
/// The field as a text; empty if there is none, or it is none.
std::string json_text(const nlohmann::json& object, const char* name);
/// The beginning of the value, for messages.
std::string json_shown(const nlohmann::json& value);

/// What a tokenizer file's `pre_tokenizer` does, refused where it is not understood.
std::vector<PreTokenizerStep> read_word_steps(const nlohmann::json& pre_tokenizer,
                                              const std::string& path);

namespace {

using nlohmann::json;

PreTokenizerStep byte_level_step(const json& part, const std::string& path) {
  PreTokenizerStep step{.prefix_space = json_flag(part, "add_prefix_space", true, path)};
  if (json_flag(part, "use_regex", true, path)) step.pattern = WordPattern::Gpt2;
  return step;
}

PreTokenizerStep split_step(const json& part, const std::string& path) {
  const json& pattern = json_field(part, "pattern");
  const std::string regex = json_text(pattern, "Regex");
  const auto known = pattern_of_regex(regex);
  if (!known)
    refuse_tokenizer(path, "the pre_tokenizer Split with the pattern " + json_shown(pattern));
  // The patterns leave nothing out, so to keep the matches and to cut at them is the same.
  const std::string behavior = json_text(part, "behavior");
  const bool invert = json_flag(part, "invert", false, path);
  if (!(behavior == "Isolated" && !invert) && !(behavior == "Removed" && invert)) {
    refuse_tokenizer(path, "the pre_tokenizer Split with the behavior \"" + behavior +
                               (invert ? "\", inverted" : "\""));
  }
  return {.pattern = known};
}

PreTokenizerStep digits_step(const json& part, const std::string& path) {
  const bool single = json_flag(part, "individual_digits", false, path);
  return {.pattern = single ? WordPattern::SingleDigits : WordPattern::DigitRuns};
}

struct StepRow {
  const char* type;
  PreTokenizerStep (*read)(const json& part, const std::string& path);
};

constexpr StepRow kSteps[] = {
    {"ByteLevel", byte_level_step}, {"Split", split_step}, {"Digits", digits_step}};

PreTokenizerStep read_step(const json& part, const std::string& path) {
  const std::string type = json_text(part, "type");
  for (const StepRow& row : kSteps) {
    if (type == row.type) return row.read(part, path);
  }
  refuse_tokenizer(path, "the pre_tokenizer " + (type.empty() ? json_shown(part) : type));
}

}  // namespace

void refuse_tokenizer(const std::string& path, const std::string& what) {
  TORCH_CHECK_VALUE(false, "Tokenizer::from_file: expected a byte-level BPE as GPT-2's in '",
                    printable(path), "', got ", printable(what),
                    ", which is not understood; it would give other tokens than the model's");
}

const json& json_field(const json& object, const char* name) {
  static const json none;
  if (!object.is_object()) return none;
  const auto found = object.find(name);
  return found == object.end() ? none : *found;
}

bool json_flag(const json& object, const char* name, bool otherwise, const std::string& path) {
  const json& value = json_field(object, name);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean())
    refuse_tokenizer(path, std::string("the value ") + json_shown(value) + " of " + name);
  return value.get<bool>();
}

std::string json_text(const json& object, const char* name) {
  const json& value = json_field(object, name);
  return value.is_string() ? value.get<std::string>() : std::string();
}

namespace {

/// The value's beginning down to some depth: dump() calls itself for each level, and a file may
/// have more of them than the stack has room for.
json beginning_of(const json& value, int levels, size_t most) {
  if (!value.is_structured()) return value;
  if (levels == 0) return value.is_array() ? "a list" : "an object";
  auto beginning = value.is_array() ? json::array() : json::object();
  for (const auto& [key, part] : value.items()) {
    if (beginning.size() == most) break;
    auto shown = beginning_of(part, levels - 1, most);
    value.is_array() ? beginning.push_back(std::move(shown))
                     : void(beginning[key] = std::move(shown));
  }
  return beginning;
}

}  // namespace

std::string json_shown(const json& value) {
  constexpr size_t kMost = 200;
  constexpr int kLevels = 4;
  std::string text = beginning_of(value, kLevels, kMost).dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kMost) text.replace(kMost, std::string::npos, " …");
  return text;
}

std::vector<PreTokenizerStep> read_word_steps(const json& pre_tokenizer, const std::string& path) {
  std::vector<PreTokenizerStep> steps;
  bool byte_level = false;
  const auto read = [&](const json& part) {
    // Bytes are written as letters after it: what follows would see those.
    if (byte_level) refuse_tokenizer(path, "a pre_tokenizer after ByteLevel");
    steps.push_back(read_step(part, path));
    byte_level = json_text(part, "type") == "ByteLevel";
  };
  if (json_text(pre_tokenizer, "type") == "Sequence") {
    for (const json& part : json_field(pre_tokenizer, "pretokenizers")) read(part);
  } else {
    read(pre_tokenizer);
  }
  if (!byte_level) refuse_tokenizer(path, "no pre_tokenizer ByteLevel");
  return steps;
}

namespace {

using nlohmann::json;

constexpr uint64_t kMostTokens = 1 << 24;
constexpr uint32_t kNotAByte = 256;

/// Byte-level files write each byte as a letter one can see: printable ones of Latin-1 as
/// themselves, the others as U+0100, U+0101, … in order.
std::array<uint32_t, 0x144> bytes_by_letter() {
  std::array<uint32_t, 0x144> bytes;
  bytes.fill(kNotAByte);
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    bytes[visible ? byte : next++] = byte;
  }
  return bytes;
}

/// The bytes that the letters stand for; none if some are not such letters.
std::optional<std::string> bytes_of_letters(const std::string& letters) {
  static const auto table = bytes_by_letter();
  std::string bytes;
  for (size_t at = 0; at < letters.size();) {
    const Utf8Char letter = utf8_at(letters, at);
    const uint32_t byte = letter.code_point < table.size() ? table[letter.code_point] : kNotAByte;
    if (byte == kNotAByte) return std::nullopt;
    bytes += static_cast<char>(byte);
    at += letter.length;
  }
  return bytes;
}

/// Reads one file; every part of it that is not understood is refused.
class TokenizerReader {
 public:
  TokenizerReader(const json& file, const std::string& path) : file_(file), path_(path) {}

  BpeParts read() {
    refuse_what_changes_tokens();
    parts_.steps = read_word_steps(json_field(file_, "pre_tokenizer"), path_);
    parts_.ignore_merges = json_flag(model(), "ignore_merges", false, path_);
    read_vocabulary();
    read_merges();
    read_added_tokens();
    return std::move(parts_);
  }

 private:
  const json& model() const { return json_field(file_, "model"); }
  [[noreturn]] void refuse(const std::string& what) const { refuse_tokenizer(path_, what); }

  void refuse_what_changes_tokens() const {
    const std::string type = json_text(model(), "type");
    if (type != "BPE") refuse("a model of type " + json_shown(json_field(model(), "type")));
    for (const char* name : {"truncation", "padding", "normalizer"}) {
      const json& value = json_field(file_, name);
      if (value.is_null()) continue;
      const std::string kind = json_text(value, "type");
      refuse(std::string("a ") + name + (kind.empty() ? "" : " of type " + kind));
    }
    for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (const std::string text = json_text(model(), name); !text.empty())
        refuse(std::string("the ") + name + " \"" + text + "\"");
    }
    if (json_flag(model(), "byte_fallback", false, path_)) refuse("byte_fallback");
    const json& dropout = json_field(model(), "dropout");
    if (!dropout.is_null() && dropout != 0.0) refuse("a dropout of " + json_shown(dropout));
    const json& decoder = json_field(file_, "decoder");
    if (!decoder.is_null() && json_text(decoder, "type") != "ByteLevel")
      refuse("a decoder of type " + json_shown(json_field(decoder, "type")));
  }

  uint32_t token_number(const json& value, const std::string& content) const {
    if (!value.is_number_unsigned() || value.get<uint64_t>() >= kMostTokens)
      refuse("the number " + json_shown(value) + " of the token \"" + content + "\"");
    return value.get<uint32_t>();
  }

  void put(uint32_t token, std::string bytes, const std::string& content) {
    if (parts_.bytes.size() <= token) parts_.bytes.resize(token + 1);
    if (bytes.empty()) refuse("an empty token " + std::to_string(token));
    if (!parts_.bytes[token].empty())
      refuse("the number " + std::to_string(token) + " for \"" + content + "\" and another token");
    parts_.bytes[token] = std::move(bytes);
  }

  void read_vocabulary() {
    const json& vocabulary = json_field(model(), "vocab");
    if (!vocabulary.is_object()) refuse("no vocab");
    for (const auto& [letters, number] : vocabulary.items()) {
      const uint32_t token = token_number(number, letters);
      tokens_.emplace(letters, token);
      const auto bytes = bytes_of_letters(letters);
      put(token, bytes.value_or(letters), letters);
      if (!bytes) continue;
      if (parts_.ignore_merges) parts_.words.emplace(*bytes, token);
      if (bytes->size() != 1) continue;
      const auto byte = static_cast<unsigned char>(bytes->front());
      parts_.byte_tokens[byte] = token;
      has_byte_[byte] = true;
    }
    const auto missing = std::find(has_byte_.begin(), has_byte_.end(), false);
    if (missing != has_byte_.end()) {
      refuse("no token for the byte " + std::to_string(missing - has_byte_.begin()) +
             " (train with initial_alphabet=ByteLevel.alphabet())");
    }
  }

  uint32_t token_of(const std::string& letters, const json& merge) const {
    const auto found = tokens_.find(letters);
    if (found == tokens_.end() || !bytes_of_letters(letters))
      refuse("the merge " + json_shown(merge) + " without a token \"" + letters + "\"");
    return found->second;
  }

  void read_merges() {
    const json& merges = json_field(model(), "merges");
    if (!merges.is_array()) refuse("no merges");
    for (const json& merge : merges) {
      std::string left;
      std::string right;
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      } else if (merge.is_string()) {
        const auto text = merge.get<std::string>();
        const size_t space = text.find(' ');
        if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
          refuse("the merge " + json_shown(merge));
        left = text.substr(0, space);
        right = text.substr(space + 1);
      } else {
        refuse("the merge " + json_shown(merge));
      }
      parts_.merges.push_back(
          {token_of(left, merge), token_of(right, merge), token_of(left + right, merge)});
    }
  }

  void read_added_tokens() {
    const json& added = json_field(file_, "added_tokens");
    if (!added.is_null() && !added.is_array()) refuse("added_tokens that are no list");
    std::vector<AddedToken> first, ordinary_first;
    std::vector<AddedToken> then, ordinary_then;
    for (const json& entry : added) {
      const std::string content = json_text(entry, "content");
      if (content.empty()) refuse("the added token " + json_shown(entry));
      for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
        if (json_flag(entry, flag, false, path_))
          refuse("the added token \"" + content + "\" with " + flag);
      }
      const uint32_t token = added_number(token_number(json_field(entry, "id"), content), content);
      const bool special = json_flag(entry, "special", false, path_);
      const bool is_late = json_flag(entry, "normalized", !special, path_);
      (is_late ? then : first).push_back({content, token});
      if (!special) (is_late ? ordinary_then : ordinary_first).push_back({content, token});
    }
    parts_.ordinary_first = AddedTokens(std::move(ordinary_first));
    parts_.ordinary_then = AddedTokens(std::move(ordinary_then));
    parts_.added_first = AddedTokens(std::move(first));
    parts_.added_then = AddedTokens(std::move(then));
  }

  /// The package numbers added tokens itself, whatever the file says; where the two differ, nobody
  /// knows which was meant.
  uint32_t added_number(uint32_t token, const std::string& content) {
    const auto known = tokens_.find(content);
    const auto expected = known != tokens_.end()
                              ? known->second
                              : std::max(static_cast<uint32_t>(tokens_.size()), next_added_);
    if (token != expected) {
      refuse("the number " + std::to_string(token) + " of the added token \"" + content +
             "\", which would be " + std::to_string(expected));
    }
    if (known == tokens_.end()) put(token, content, content);
    next_added_ = std::max(next_added_, token + 1);
    return token;
  }

  const json& file_;
  const std::string& path_;
  BpeParts parts_;
  std::unordered_map<std::string, uint32_t> tokens_;  // by their letters
  std::array<bool, 256> has_byte_{};
  uint32_t next_added_ = 0;
};

}  // namespace

TokenizerFile read_tokenizer_file(const std::string& path) {
  const std::string text = read_whole_file(path, "Tokenizer::from_file");
  ContentHash hash;
  hash.add(text);
  json file;
  try {
    file = json::parse(text);
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false, "Tokenizer::from_file: expected a tokenizer.json, but '",
                      printable(path), "' is no JSON: ", printable(error.what()));
  }
  return {TokenizerReader(file, path).read(), hash.text()};
}

}  // namespace tessera::data
