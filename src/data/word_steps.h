#pragma once

#include "data/words.h"

#include <nlohmann/json.hpp>

#include <string>
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
std::vector<WordStep> read_word_steps(const nlohmann::json& pre_tokenizer, const std::string& path);

}  // namespace tessera::data
