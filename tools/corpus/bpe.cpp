#include "corpus/bpe.h"

#include "corpus/unicode_classes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>

namespace tessera::data {

namespace {

constexpr uint64_t kNoPair = ~uint64_t{0};
constexpr size_t kLongestKnownWord = 64;
constexpr size_t kMostKnownWords = 1 << 17;

uint64_t pair_of(uint32_t left, uint32_t right) { return uint64_t{left} << 32 | right; }

size_t slot_of(uint64_t pair, size_t slots) {
  return (pair * 0x9E3779B97F4A7C15U >> 32) & (slots - 1);
}

bool ends_with_letter(std::string_view text) {
  for (size_t length = 1; length <= std::min<size_t>(4, text.size()); ++length) {
    const Utf8Char c = utf8_at(text, text.size() - length);
    if (c.valid && c.length == length) return class_of(c.code_point) == CharClass::Letter;
  }
  return false;
}

/// Whether no word goes on at `at`, and the text from there on would get no space in front.
bool is_cut(std::string_view text, size_t at) {
  return text[at] == ' ' && ends_with_letter(text.substr(0, at));
}

bool has_cut_inside(const AddedTokens& added) {
  return std::any_of(added.tokens().begin(), added.tokens().end(), [](const AddedToken& token) {
    for (size_t at = 1; at < token.content.size(); ++at) {
      if (is_cut(token.content, at)) return true;
    }
    return false;
  });
}

/// Whether the step ends a word between a letter and a space.
bool parts_words(const PreTokenizerStep& step) {
  return step.pattern == WordPattern::Gpt2 || step.pattern == WordPattern::Gpt4 ||
         step.pattern == WordPattern::Gpt4SingleDigit;
}

}  // namespace

Bpe::Bpe(BpeParts parts) : parts_(std::move(parts)) {
  slots_.assign(std::bit_ceil(2 * parts_.merges.size() + 2), {kNoPair, {}});
  for (uint32_t rank = 0; rank < parts_.merges.size(); ++rank) {
    const BpeMerge& merge = parts_.merges[rank];
    const uint64_t pair = pair_of(merge.left, merge.right);
    size_t at = slot_of(pair, slots_.size());
    while (slots_[at].pair != kNoPair && slots_[at].pair != pair)
      at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {pair,
                  {rank, merge.result}};  // named twice: the later one counts, as in the package
  }
  can_cut_ = std::any_of(parts_.steps.begin(), parts_.steps.end(), parts_words) &&
             !has_cut_inside(parts_.added_first) && !has_cut_inside(parts_.added_then);
}

Bpe::Merged Bpe::merge_of(uint32_t left, uint32_t right) const {
  const uint64_t pair = pair_of(left, right);
  size_t at = slot_of(pair, slots_.size());
  while (slots_[at].pair != kNoPair) {
    if (slots_[at].pair == pair) return slots_[at].merged;
    at = (at + 1) & (slots_.size() - 1);
  }
  return {};
}

size_t Bpe::safe_cut(std::string_view text) const {
  if (!can_cut_) return 0;
  for (size_t at = text.size(); at-- > 1;) {
    if (is_cut(text, at)) return at;
  }
  return 0;
}

void BpeEncoder::encode(std::string_view text, std::vector<uint32_t>& tokens, bool has_special) {
  if (!is_utf8(text)) {
    encode(replace_invalid_utf8(text), tokens, has_special);
    return;
  }
  const auto& parts = bpe_.parts();
  const auto with_tokens = [&tokens](const AddedTokens& added, std::string_view piece,
                                     const auto& encode_rest) {
    size_t begin = 0;
    while (const auto match = added.find(piece, begin)) {
      encode_rest(piece.substr(begin, match->begin - begin));
      tokens.push_back(match->token);
      begin = match->end;
    }
    encode_rest(piece.substr(begin));
  };
  with_tokens(has_special ? parts.added_first : parts.ordinary_first, text,
              [&](std::string_view piece) {
                with_tokens(has_special ? parts.added_then : parts.ordinary_then, piece,
                            [&](std::string_view rest) { encode_words(rest, tokens); });
              });
}

void BpeEncoder::encode_words(std::string_view text, std::vector<uint32_t>& tokens) {
  for_each_word(bpe_.parts().steps, text,
                [&](std::string_view word) { encode_word(word, tokens); });
}

void BpeEncoder::encode_word(std::string_view word, std::vector<uint32_t>& tokens) {
  if (word.size() > kLongestKnownWord) {
    merge_word(word, tokens);
    return;
  }
  auto known = known_.find(word);
  if (known == known_.end()) {
    if (known_.size() >= kMostKnownWords) known_.clear();
    std::vector<uint32_t> made;
    merge_word(word, made);
    known = known_.emplace(word, std::move(made)).first;
  }
  tokens.insert(tokens.end(), known->second.begin(), known->second.end());
}

void BpeEncoder::offer(int32_t left) {
  const Symbol& symbol = symbols_[static_cast<size_t>(left)];
  if (symbol.next < 0) return;
  const uint32_t right = symbols_[static_cast<size_t>(symbol.next)].token;
  const Bpe::Merged merged = bpe_.merge_of(symbol.token, right);
  if (merged.rank == Bpe::kNever) return;
  queue_.push_back(uint64_t{merged.rank} << 32 | static_cast<uint32_t>(left));
  std::push_heap(queue_.begin(), queue_.end(), std::greater<>());
}

void BpeEncoder::merge_word(std::string_view word, std::vector<uint32_t>& tokens) {
  const BpeParts& parts = bpe_.parts();
  if (parts.ignore_merges) {
    if (const auto whole = parts.words.find(std::string(word)); whole != parts.words.end()) {
      tokens.push_back(whole->second);
      return;
    }
  }
  TORCH_CHECK_VALUE(word.size() < size_t{1} << 31,
                    "Tokenizer::encode: expected words below 2 GiB, got one of ", word.size(),
                    " bytes without a place to cut it");
  const auto size = static_cast<int32_t>(word.size());
  symbols_.clear();
  queue_.clear();
  for (int32_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(word[static_cast<size_t>(i)]);
    symbols_.push_back({parts.byte_tokens[byte], i - 1, i + 1 < size ? i + 1 : -1});
  }
  for (int32_t i = 0; i < size; ++i) offer(i);
  constexpr uint32_t kGone = ~uint32_t{0};
  while (!queue_.empty()) {
    std::pop_heap(queue_.begin(), queue_.end(), std::greater<>());
    const auto rank = static_cast<uint32_t>(queue_.back() >> 32);
    const auto place = static_cast<int32_t>(queue_.back() & 0xFFFFFFFFU);
    queue_.pop_back();
    Symbol& left = symbols_[static_cast<size_t>(place)];
    if (left.token == kGone || left.next < 0) continue;
    Symbol& right = symbols_[static_cast<size_t>(left.next)];
    const Bpe::Merged merged = bpe_.merge_of(left.token, right.token);
    if (merged.rank != rank) continue;  // one of the two has merged otherwise meanwhile
    left.token = merged.token;
    right.token = kGone;
    left.next = right.next;
    if (left.next >= 0) symbols_[static_cast<size_t>(left.next)].previous = place;
    if (left.previous >= 0) offer(left.previous);
    offer(place);
  }
  for (const Symbol& symbol : symbols_) {
    if (symbol.token != kGone) tokens.push_back(symbol.token);
  }
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::stable_sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) {
    return a.content.size() > b.content.size();
  });
  for (const AddedToken& token : tokens_)
    begins_[static_cast<unsigned char>(token.content.front())] = true;
}

std::optional<AddedTokens::Match> AddedTokens::find(std::string_view text, size_t from) const {
  if (tokens_.empty()) return std::nullopt;
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!begins_[static_cast<unsigned char>(text[begin])]) continue;
    const std::string_view rest = text.substr(begin);
    for (const AddedToken& token : tokens_) {
      if (rest.starts_with(token.content))
        return Match{begin, begin + token.content.size(), token.token};
    }
  }
  return std::nullopt;
}

}  // namespace tessera::data
