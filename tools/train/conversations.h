#pragma once

#include "train/chat.h"
#include "train/sequences.h"

#include <string>
#include <vector>

/// Conversations to learn answers from: files with one JSON object per line.
namespace tessera::train {

struct ConversationFiles {
  std::vector<ChatSample> samples;  // in the order of files and lines
  std::vector<data::FileContent> files;
};

/// Lines {"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"};
/// blank ones are passed over. Throws a ValueError that names file and line.
ConversationFiles read_conversations(const std::vector<std::string>& paths,
                                     const ChatFormat& format);

/// Which samples lie in a row together, by their places in `lengths`. Every sample is in one row,
/// and no row is longer than `most`. Longest first, each into the row that has least room left for
/// it. None may be longer than `most`.
std::vector<std::vector<size_t>> pack_rows_of(const std::vector<int64_t>& lengths, int64_t most);

/// Rows of `context` tokens, each with whole conversations, which do not see each other. Targets
/// are -100 but for answers.
class PackedConversations final : public Sequences {
 public:
  /// Samples of more than context + 1 tokens lose their ends; those without an answer in what is
  /// left are left out. Throws a ValueError if too few are left.
  PackedConversations(const std::vector<std::string>& paths, ChatFormat format,
                      data::Tokenizer tokenizer, int64_t context, double validation);

  int64_t trained() const override { return trained_; }
  int64_t validated() const override { return std::ssize(rows_) - trained_; }
  Batch read(const std::vector<int64_t>& sequences) const override;
  int64_t targets(int64_t sequence) const override;
  int64_t bytes(int64_t /*sequence*/) const override { return 0; }
  bool has_weights() const override { return true; }

  const data::Tokenizer& tokenizer() const override { return tokenizer_; }
  std::string fingerprint() const override { return fingerprint_; }
  const std::vector<data::FileContent>& contents() const override { return files_; }
  int64_t tokens() const override { return tokens_; }
  std::string described() const override;
  std::vector<int64_t> prompt(const std::string& text) const override {
    return format_.prompt(text);
  }
  std::optional<int64_t> end() const override { return format_.end(); }

 private:
  /// Into rows of their own; the samples from `first` to `last`.
  void pack(size_t first, size_t last);

  ChatFormat format_;
  data::Tokenizer tokenizer_;
  int64_t context_;
  std::vector<ChatSample> samples_;
  std::vector<data::FileContent> files_;
  std::vector<std::vector<size_t>> rows_;  // samples, to train on first
  std::string fingerprint_;
  int64_t trained_ = 0, tokens_ = 0, cut_ = 0, left_out_ = 0;
};

}  // namespace tessera::train
