#include "train/chat.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>

namespace tessera::train {
namespace {

constexpr const char* kChatMl = "chatml";
constexpr const char* kLlama3 = "llama3";
constexpr const char* kPlain = "plain";

// What ends answers in the plain format: the first that the tokenizer has.
constexpr const char* kEnds[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"};
constexpr int64_t kEndOfBytes = 0;  // where each byte is a token: texts have no such byte

std::string format_for(const data::Tokenizer& tokenizer) {
  const auto has = [&](const char* content) { return tokenizer.added_token(content).has_value(); };
  if (has("<|im_start|>") && has("<|im_end|>")) return kChatMl;
  if (has("<|start_header_id|>") && has("<|end_header_id|>") && has("<|eot_id|>")) return kLlama3;
  return kPlain;
}

/// As Llama 3's template does.
std::string trimmed(const std::string& text) {
  const auto is_space = [](char letter) {
    return std::isspace(static_cast<unsigned char>(letter)) != 0;
  };
  const auto begin = std::find_if_not(text.begin(), text.end(), is_space);
  const auto end = std::find_if_not(text.rbegin(), text.rend(), is_space).base();
  return begin < end ? std::string(begin, end) : std::string();
}

std::string capitalized(std::string role) {
  role[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(role[0])));
  return role;
}

void add(ChatSample& sample, int64_t token, bool is_answer = false) {
  sample.tokens.push_back(static_cast<int32_t>(token));
  sample.is_answer.push_back(is_answer);
}

}  // namespace

int64_t ChatFormat::control(const char* content) {
  const auto token = tokenizer_.added_token(content);
  TORCH_CHECK_VALUE(token, "--chat-format ", name_, ": expected a tokenizer with the token ",
                    content, ", which ", tokenizer_.name(),
                    " lacks; take that of a chat model, or --chat-format plain");
  control_.push_back(*token);
  return *token;
}

ChatFormat::ChatFormat(data::Tokenizer tokenizer, const std::string& name)
    : tokenizer_(std::move(tokenizer)), name_(name == "auto" ? format_for(tokenizer_) : name) {
  if (name_ == kChatMl) {
    start_ = control("<|im_start|>");
    end_ = control("<|im_end|>");
    return;
  }
  if (name_ == kLlama3) {
    start_ = control("<|start_header_id|>");
    header_end_ = control("<|end_header_id|>");
    end_ = control("<|eot_id|>");
    if (tokenizer_.added_token("<|begin_of_text|>")) begin_ = control("<|begin_of_text|>");
    return;
  }
  if (tokenizer_.is_bytes()) {
    control_ = {end_ = kEndOfBytes};
    return;
  }
  for (const char* end : kEnds) {
    if (end_ < 0 && tokenizer_.added_token(end)) end_ = control(end);
  }
  if (end_ < 0) end_ = control(kEnds[0]);  // throws
}

void ChatFormat::add_text(ChatSample& sample, const std::string& text, bool is_answer) const {
  for (const auto token : tokenizer_.encode_ordinary(text)) {
    TORCH_CHECK_VALUE(std::ranges::count(control_, token) == 0, "expected texts without '",
                      tokenizer_.is_bytes() ? std::string("\\u0000")
                                            : tokenizer_.decode(std::vector<int64_t>{token}),
                      "', which ends or begins messages");
    add(sample, token, is_answer);
  }
}

void ChatFormat::begin(ChatSample& sample) const {
  if (begin_ >= 0) add(sample, begin_);
}

void ChatFormat::write_header(const std::string& role, const std::string& content,
                              ChatSample& sample) const {
  if (start_ >= 0) add(sample, start_);
  if (name_ == kChatMl) return add_text(sample, role + "\n" + content);
  if (name_ == kLlama3) {
    add_text(sample, role);
    add(sample, header_end_);
    return add_text(sample, "\n\n" + content);
  }
  add_text(sample, "### " + capitalized(role) + "\n" + content);
}

void ChatFormat::write(const Message& message, ChatSample& sample) const {
  const auto content = name_ == kLlama3 ? trimmed(message.content) : message.content;
  const bool is_answer = message.role == "assistant";
  // An answer's tokens are cut as the model will have to say them, behind a header that is there.
  write_header(message.role, is_answer ? "" : content, sample);
  if (is_answer) add_text(sample, content, /*is_answer=*/true);
  if (is_answer || name_ != kPlain) add(sample, end_, is_answer);
  if (name_ == kChatMl) add_text(sample, "\n");
  if (name_ == kPlain) add_text(sample, "\n\n");
}

ChatSample ChatFormat::sample(const std::vector<Message>& messages) const {
  ChatSample sample;
  begin(sample);
  for (const auto& message : messages) write(message, sample);
  return sample;
}

std::vector<int64_t> ChatFormat::prompt(const std::string& content) const {
  ChatSample sample;
  begin(sample);
  write({"user", content}, sample);
  write_header("assistant", "", sample);
  return {sample.tokens.begin(), sample.tokens.end()};
}

}  // namespace tessera::train
