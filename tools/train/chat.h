#pragma once

#include <tessera/corpus.h>

#include <cstdint>
#include <string>
#include <vector>

/// Conversations as rows of tokens, in the form that a model knows.
namespace tessera::train {

struct Message {
  std::string role;  // system, user or assistant
  std::string content;
};

/// The tokens of a conversation, and which of them the model is to learn to say: answers, each with
/// the token that ends it.
struct ChatSample {
  std::vector<int32_t> tokens;
  std::vector<bool> is_answer;
};

/// Writes conversations. What people wrote never becomes a token that structures them.
class ChatFormat {
 public:
  /// "chatml", "llama3", "plain", or "auto": by the tokens that the tokenizer has. Throws a
  /// ValueError if it lacks some.
  ChatFormat(data::Tokenizer tokenizer, const std::string& name);

  ChatSample sample(const std::vector<Message>& messages) const;
  /// A user's message, and what stands before the answer.
  std::vector<int64_t> prompt(const std::string& content) const;
  /// What ends an answer.
  int64_t end() const { return end_; }
  const std::string& name() const { return name_; }

 private:
  void begin(ChatSample& sample) const;
  void write(const Message& message, ChatSample& sample) const;
  /// What stands before the content of a message; `content` goes on with it.
  void write_header(const std::string& role, const std::string& content, ChatSample& sample) const;
  void add_text(ChatSample& sample, const std::string& text, bool is_answer = false) const;
  /// Of the tokenizer; a ValueError if it has none.
  int64_t control(const char* content);

  data::Tokenizer tokenizer_;
  std::string name_;
  int64_t begin_ = -1;            // of a conversation; -1: none
  int64_t start_ = -1;            // of a header; -1: none
  int64_t header_end_ = -1;       // -1: none
  int64_t end_ = -1;              // of a message
  std::vector<int64_t> control_;  // all of them
};

}  // namespace tessera::train
