#include "data/bpe.h"

#include <algorithm>

namespace tessera::data {

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
