#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::data {

/// How a text is cut into words, within which alone a BPE merges. Each is written out by hand after
/// a regular expression that tokenizer files name it by, and leaves nothing of the text out.
enum class WordPattern {
  Gpt2,
  Gpt4,             // numbers of up to three digits
  Gpt4SingleDigit,  // one digit each
  DigitRuns,        // numbers apart from all else
  SingleDigits,     // each digit apart from all else
};

/// None: a regular expression that is not known.
std::optional<WordPattern> pattern_of_regex(std::string_view regex);

/// Where the word ends that begins at `begin`. The text is valid UTF-8 and goes on after `begin`.
size_t word_end(WordPattern pattern, std::string_view text, size_t begin);

/// One step on the way from text to words. The pieces that a step leaves are cut further by the
/// next one, as if each were a text of its own.
struct PreTokenizerStep {
  bool prefix_space = false;  // a piece gets a space in front if it has none
  std::optional<WordPattern> pattern = std::nullopt;
};

/// Calls `take(word)` for the words of `text` after all steps from `step` on.
template <class Take>
void for_each_word(const std::vector<PreTokenizerStep>& steps, std::string_view text,
                   const Take& take, size_t step = 0) {
  if (text.empty()) return;
  if (step == steps.size()) {
    take(text);
    return;
  }
  std::string prefixed;
  if (steps[step].prefix_space && text.front() != ' ') {
    prefixed.append(" ").append(text);
    text = prefixed;
  }
  if (!steps[step].pattern) {
    for_each_word(steps, text, take, step + 1);
    return;
  }
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = word_end(*steps[step].pattern, text, begin);
    for_each_word(steps, text.substr(begin, end - begin), take, step + 1);
    begin = end;
  }
}

}  // namespace tessera::data
