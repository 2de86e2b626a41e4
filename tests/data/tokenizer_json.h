#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

/// Small tokenizer files for tests.
namespace tessera::data::testing {

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

inline std::string utf8_letter(int code_point) {
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3F))};
}

/// How tokenizer files write a byte.
inline std::string letter_of(int byte) {
  int hidden = 0;
  for (int b = 0; b <= byte; ++b) {
    const bool visible = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b != 0xAD);
    if (b == byte) return utf8_letter(visible ? b : 0x100 + hidden);
    if (!visible) ++hidden;
  }
  return {};
}

/// A tokenizer.json: bytes are tokens 0 to 255, then come `merges`, in the order of their results.
struct TokenizerJson {
  std::vector<std::pair<std::string, std::string>> merges = {};  // in letters of the file
  bool merges_as_lists = true;
  std::string added_tokens = "";  // elements of the list
  std::string normalizer = "null";
  std::string pre_tokenizer =
      R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})";
  std::string decoder = R"({"type": "ByteLevel"})";
  std::string truncation = "null";
  std::string model_fields = R"("type": "BPE",)";  // further ones, each with a comma
  std::string more_vocabulary = "";                // entries, each with a comma in front
  int first_byte = 0;                              // above 0: bytes below it are left out

  std::string text() const {
    std::string vocabulary;
    int token = 0;
    const auto add = [&](const std::string& letters) {
      const bool escape = letters == "\"" || letters == "\\";
      vocabulary += (vocabulary.empty() ? "\"" : ", \"") + std::string(escape ? "\\" : "") +
                    letters + "\": " + std::to_string(token++);
    };
    for (int byte = first_byte; byte < 256; ++byte) add(letter_of(byte));
    std::string list;
    for (const auto& [left, right] : merges) {
      add(left + right);
      list +=
          (list.empty() ? "" : ", ") + (merges_as_lists ? "[\"" + left + "\", \"" + right + "\"]"
                                                        : "\"" + left + " " + right + "\"");
    }
    return R"({"version": "1.0", "truncation": )" + truncation +
           R"(, "padding": null, "added_tokens": [)" + added_tokens + R"(], "normalizer": )" +
           normalizer + R"(, "pre_tokenizer": )" + pre_tokenizer +
           R"(, "post_processor": null, "decoder": )" + decoder + R"(, "model": {)" + model_fields +
           R"("vocab": {)" + vocabulary + more_vocabulary + R"(}, "merges": [)" + list + "]}}";
  }

  std::string write(const std::filesystem::path& path) const {
    write_text(path, text());
    return path.string();
  }
};

}  // namespace tessera::data::testing
