#include "train/sequences.h"

#include "train/agreed.h"
#include "train/conversations.h"
#include "train/language_model.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera::train {
namespace {

/// Its message about folders without text names the setting, as those about wrong ones do.
data::Corpus corpus_of(const Settings& settings) {
  auto tokenizer = make_tokenizer(settings);
  try {
    return data::Corpus(settings.data, std::move(tokenizer));
  } catch (const c10::ValueError& error) {
    const std::string name = "Corpus: ", message = error.what_without_backtrace();
    TORCH_CHECK_VALUE(!message.starts_with(name + "expected text"),
                      "--data: ", message.substr(name.size()));
    throw;
  }
}

int64_t validation_part(const Settings& settings, int64_t sequences) {
  if (settings.validation == 0) return 0;
  return std::max<int64_t>(
      1, static_cast<int64_t>(settings.validation * static_cast<double>(sequences)));
}

/// Text cut into sequences: its beginning to train on, its end to validate. They overlap by one
/// token: the last target of one is the first token of the next.
class TextSequences final : public Sequences {
 public:
  explicit TextSequences(const Settings& settings)
      : corpus_(corpus_of(settings)), context_(settings.context) {
    const auto sequences = (corpus_.tokens() - 1) / context_;
    const int64_t needed = settings.validation == 0 ? 1 : 2;
    TORCH_CHECK_VALUE(sequences >= needed, "train: expected text of at least ",
                      needed * context_ + 1, " tokens (--context ", context_, "), got ",
                      corpus_.tokens(), " in ", corpus_.files(),
                      " file(s); give more --data or a shorter --context");
    validated_ = validation_part(settings, sequences);
    trained_ = sequences - validated_;
  }

  int64_t trained() const override { return trained_; }
  int64_t validated() const override { return validated_; }
  Batch read(const std::vector<int64_t>& sequences) const override {
    const auto windows = [&] {
      try {
        return corpus_.windows(sequences, context_, context_ + 1);
      } catch (const c10::ValueError& error) {
        throw TextError(message_of(error));
      }
    }();
    return {.tokens = windows.narrow(1, 0, context_).contiguous(),
            .targets = windows.narrow(1, 1, context_).contiguous(),
            .positions = {}};
  }
  int64_t targets(int64_t /*sequence*/) const override { return context_; }
  bool has_weights() const override { return false; }

  const data::Tokenizer& tokenizer() const override { return corpus_.tokenizer(); }
  std::string fingerprint() const override { return corpus_.fingerprint(); }
  const std::vector<data::FileContent>& contents() const override { return corpus_.contents(); }
  int64_t tokens() const override { return corpus_.tokens(); }
  std::string described() const override {
    return counted(corpus_.tokens(), "token") + " of text in " + counted(corpus_.files(), "file");
  }
  std::vector<int64_t> prompt(const std::string& text) const override {
    return corpus_.tokenizer().encode(text);
  }
  std::optional<int64_t> end() const override { return std::nullopt; }

 private:
  data::Corpus corpus_;
  int64_t context_, trained_ = 0, validated_ = 0;
};

}  // namespace

std::shared_ptr<const Sequences> make_sequences(const Settings& settings) {
  if (settings.sft.empty()) return std::make_shared<TextSequences>(settings);
  const auto tokenizer = make_tokenizer(settings);
  return std::make_shared<PackedConversations>(settings.sft,
                                               ChatFormat(tokenizer, settings.chat_format),
                                               tokenizer, settings.context, settings.validation);
}

std::string counted(int64_t count, const char* thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
}

}  // namespace tessera::train
