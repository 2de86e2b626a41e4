#include "data/word_steps.h"

#include "base/text.h"

#include <c10/util/Exception.h>

namespace tessera::data {

namespace {

using nlohmann::json;

WordStep byte_level_step(const json& part, const std::string& path) {
  WordStep step{.prefix_space = json_flag(part, "add_prefix_space", true, path)};
  if (json_flag(part, "use_regex", true, path)) step.pattern = WordPattern::Gpt2;
  return step;
}

WordStep split_step(const json& part, const std::string& path) {
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

WordStep digits_step(const json& part, const std::string& path) {
  const bool single = json_flag(part, "individual_digits", false, path);
  return {.pattern = single ? WordPattern::SingleDigits : WordPattern::DigitRuns};
}

struct StepRow {
  const char* type;
  WordStep (*read)(const json& part, const std::string& path);
};

constexpr StepRow kSteps[] = {
    {"ByteLevel", byte_level_step}, {"Split", split_step}, {"Digits", digits_step}};

WordStep read_step(const json& part, const std::string& path) {
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

std::string json_shown(const json& value) {
  constexpr size_t kMost = 200;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  if (text.size() > kMost) text.replace(kMost, std::string::npos, " …");
  return text;
}

std::vector<WordStep> read_word_steps(const json& pre_tokenizer, const std::string& path) {
  std::vector<WordStep> steps;
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

}  // namespace tessera::data
