#include "train/sequences.h"

#include "base/text.h"
#include "train/agreed.h"
#include "train/conversations.h"
#include "train/language_model.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <unordered_set>

namespace tessera::train {
namespace {

/// Its message about folders without text names the setting, as those about wrong ones do.
data::Corpus corpus_of(const char* flag, const std::vector<std::string>& paths,
                       data::Tokenizer tokenizer) {
  try {
    return data::Corpus(paths, std::move(tokenizer));
  } catch (const c10::ValueError& error) {
    const std::string name = "Corpus: ", message = error.what_without_backtrace();
    TORCH_CHECK_VALUE(!message.starts_with(name + "expected text"), flag, ": ",
                      message.substr(name.size()));
    throw;
  }
}

/// Text cut into sequences: its beginning to train on, its end, or --validation-data, to validate.
/// They overlap by one token: the last target of one is the first token of the next.
class TextSequences final : public Sequences {
 public:
  explicit TextSequences(const Settings& settings)
      : corpus_(corpus_of("--data", settings.data, make_tokenizer(settings))),
        context_(settings.context),
        files_(corpus_.contents()) {
    const bool keeps_end = settings.validation > 0 && settings.validation_data.empty();
    const auto sequences = (corpus_.tokens() - 1) / context_;
    const int64_t needed = keeps_end ? 2 : 1;
    TORCH_CHECK_VALUE(sequences >= needed, "train: expected text of at least ",
                      needed * context_ + 1, " tokens (--context ", context_, "), got ",
                      corpus_.tokens(), " in ", corpus_.files(),
                      " file(s); give more --data or a shorter --context");
    if (keeps_end)
      validated_ = std::max<int64_t>(
          1, static_cast<int64_t>(settings.validation * static_cast<double>(sequences)));
    trained_ = sequences - validated_;
    if (!settings.validation_data.empty()) hold_out(settings.validation_data);
  }

  int64_t trained() const override { return trained_; }
  int64_t validated() const override { return validated_; }
  Batch read(const std::vector<int64_t>& sequences) const override {
    const auto windows = windows_of(sequences);
    return {.tokens = windows.narrow(1, 0, context_).contiguous(),
            .targets = windows.narrow(1, 1, context_).contiguous(),
            .positions = {}};
  }
  int64_t targets(int64_t /*sequence*/) const override { return context_; }
  int64_t bytes(int64_t sequence) const override {
    if (tokenizer().is_bytes()) return context_;
    const auto targets = windows_of({sequence}).narrow(1, 1, context_).contiguous();
    return std::ssize(tokenizer().decode(
        {targets.const_data_ptr<int64_t>(), static_cast<size_t>(targets.numel())}));
  }
  bool has_weights() const override { return false; }

  const data::Tokenizer& tokenizer() const override { return corpus_.tokenizer(); }
  std::string fingerprint() const override {
    return corpus_.fingerprint() + (held_out_ ? "+" + held_out_->fingerprint() : "");
  }
  const std::vector<data::FileContent>& contents() const override { return files_; }
  int64_t tokens() const override { return corpus_.tokens(); }
  std::string described() const override {
    return counted(corpus_.tokens(), "token") + " of text in " + counted(corpus_.files(), "file");
  }
  std::vector<int64_t> prompt(const std::string& text) const override {
    return corpus_.tokenizer().encode(text);
  }
  std::optional<int64_t> end() const override { return std::nullopt; }

 private:
  void hold_out(const std::vector<std::string>& paths) {
    held_out_ = corpus_of("--validation-data", paths, corpus_.tokenizer());
    validated_ = (held_out_->tokens() - 1) / context_;
    TORCH_CHECK_VALUE(validated_ > 0, "--validation-data: expected at least ", context_ + 1,
                      " tokens (--context ", context_, "), got ", held_out_->tokens(), " in ",
                      held_out_->files(), " file(s); give more of it or a shorter --context");
    std::unordered_set<std::string> trained;
    for (const auto& file : corpus_.contents()) trained.insert(file.hash);
    for (const auto& file : held_out_->contents()) {
      TORCH_CHECK_VALUE(!trained.contains(file.hash),
                        "--validation-data: expected text that is not trained on, got '",
                        printable(file.name),
                        "', whose content --data has, too; leave it out of "
                        "one of the two");
      files_.push_back({"--validation-data: " + file.name, file.hash});
    }
  }

  /// All of them to train on, or none.
  at::Tensor windows_of(std::vector<int64_t> sequences) const {
    const bool is_apart = held_out_ && !sequences.empty() && sequences.front() >= trained_;
    if (is_apart) {
      for (auto& sequence : sequences) sequence -= trained_;
    }
    try {
      return (is_apart ? *held_out_ : corpus_).windows(sequences, context_, context_ + 1);
    } catch (const c10::ValueError& error) {
      throw TextError(message_of(error));
    }
  }

  data::Corpus corpus_;
  std::optional<data::Corpus> held_out_;  // of --validation-data
  int64_t context_, trained_ = 0, validated_ = 0;
  std::vector<data::FileContent> files_;
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
