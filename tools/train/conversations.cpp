#include "train/conversations.h"

#include "base/text.h"
#include "corpus/content_hash.h"
#include "corpus/text_file.h"
#include "train/agreed.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <string_view>

namespace tessera::train {
namespace {

using nlohmann::json;

constexpr const char* kCaller = "--sft";
constexpr const char* kRoles[] = {"system", "user", "assistant"};
constexpr int64_t kNoTarget = -100;

/// For messages: not long.
std::string shown(const json& value) {
  constexpr size_t kMost = 80;
  if (value.is_structured()) return value.is_array() ? "a list" : "an object";  // of any depth
  auto text = value.dump(-1, ' ', /*ensure_ascii=*/true);
  return text.size() > kMost ? text.substr(0, kMost) + "…" : text;
}

std::string text_field(const json& object, const char* name) {
  const auto found = object.find(name);
  TORCH_CHECK_VALUE(found != object.end() && found->is_string(), "expected a string for ", name,
                    ", got ", found == object.end() ? "none" : shown(*found));
  return found->get<std::string>();
}

Message message_in(const json& value) {
  TORCH_CHECK_VALUE(value.is_object(), "expected messages to be objects, got ", shown(value));
  Message message{.role = text_field(value, "role"), .content = {}};
  TORCH_CHECK_VALUE(std::ranges::count(kRoles, message.role) > 0,
                    "expected the role system, user or assistant, got ", shown(message.role));
  TORCH_CHECK_VALUE(!value.contains("tool_calls"), "expected messages without tool_calls, ",
                    "which no format here has");
  message.content = text_field(value, "content");
  return message;
}

std::vector<Message> messages_in(const json& line) {
  TORCH_CHECK_VALUE(line.is_object(), "expected an object with messages, or with prompt and ",
                    "completion, got ", shown(line));
  const auto list = line.find("messages");
  if (list == line.end()) {
    TORCH_CHECK_VALUE(line.contains("prompt"), "expected an object with messages, or with prompt ",
                      "and completion, got ", shown(line));
    return {{"user", text_field(line, "prompt")}, {"assistant", text_field(line, "completion")}};
  }
  TORCH_CHECK_VALUE(list->is_array(), "expected messages to be a list, got ", shown(*list));
  std::vector<Message> messages;
  for (const auto& one : *list) messages.push_back(message_in(one));
  const bool has_answer = std::ranges::any_of(
      messages, [](const auto& message) { return message.role == "assistant"; });
  TORCH_CHECK_VALUE(has_answer, "expected a message of role assistant, got none");
  return messages;
}

ChatSample sample_of(std::string_view line, const ChatFormat& format) {
  const auto value = json::parse(line, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(!value.is_discarded(), "expected a line of JSON in UTF-8, got ",
                    "something else");
  return format.sample(messages_in(value));
}

void read_file(const std::string& path, const ChatFormat& format, ConversationFiles& files) {
  const auto text = data::read_whole_file(path, kCaller);
  data::ContentHash hash;
  hash.add(text);
  files.files.push_back({std::filesystem::path(path).filename().string(), hash.text()});
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    const auto line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    try {
      files.samples.push_back(sample_of(line, format));
    } catch (const c10::ValueError& error) {
      TORCH_CHECK_VALUE(false, kCaller, ": ", printable(path), ":", number, ": ",
                        error.what_without_backtrace());
    }
  }
}

/// How many of the places of a row learn something.
int64_t answers_in(const ChatSample& sample) {
  return std::count(sample.is_answer.begin() + 1, sample.is_answer.end(), true);
}

/// Places that a sample takes: its last token is a target alone.
int64_t length_of(const ChatSample& sample) { return std::ssize(sample.tokens) - 1; }

}  // namespace

ConversationFiles read_conversations(const std::vector<std::string>& paths,
                                     const ChatFormat& format) {
  ConversationFiles files;
  for (const auto& path : paths) read_file(path, format, files);
  return files;
}

std::vector<std::vector<size_t>> pack_rows_of(const std::vector<int64_t>& lengths, int64_t most) {
  std::vector<size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
  std::vector<std::vector<size_t>> rows;
  std::set<std::pair<int64_t, size_t>> room;  // that is left, and the row
  for (const auto sample : order) {
    const auto best = room.lower_bound({lengths[sample], 0});
    if (best == room.end()) {
      rows.push_back({sample});
      room.emplace(most - lengths[sample], rows.size() - 1);
      continue;
    }
    const auto [left, row] = *best;
    room.erase(best);
    rows[row].push_back(sample);
    room.emplace(left - lengths[sample], row);
  }
  return rows;
}

PackedConversations::PackedConversations(const std::vector<std::string>& paths, ChatFormat format,
                                         data::Tokenizer tokenizer, int64_t context,
                                         double validation)
    : format_(std::move(format)), tokenizer_(std::move(tokenizer)), context_(context) {
  auto read = read_conversations(paths, format_);
  files_ = std::move(read.files);
  data::ContentHash hash;
  for (const auto& file : files_) hash.add_text(file.hash);
  fingerprint_ = hash.text() + " " + format_.name() + " " + tokenizer_.name();
  for (auto& sample : read.samples) {
    if (length_of(sample) > context_) {
      sample.tokens.resize(static_cast<size_t>(context_) + 1);
      sample.is_answer.resize(sample.tokens.size());
      ++cut_;
    }
    if (answers_in(sample) == 0) {
      ++left_out_;
      continue;
    }
    tokens_ += std::ssize(sample.tokens);
    samples_.push_back(std::move(sample));
  }
  const auto count = std::ssize(samples_);
  const int64_t kept =
      validation == 0
          ? 0
          : std::max<int64_t>(1, static_cast<int64_t>(validation * static_cast<double>(count)));
  TORCH_CHECK_VALUE(count > kept, kCaller, ": expected at least ", kept + 1,
                    " conversations whose answers begin within --context ", context_, " tokens",
                    kept > 0 ? ", one of them for --validation" : "", ", got ", count, " of ",
                    count + left_out_, " in ", counted(std::ssize(files_), "file"));
  pack(0, static_cast<size_t>(count - kept));
  trained_ = std::ssize(rows_);
  pack(static_cast<size_t>(count - kept), static_cast<size_t>(count));
}

void PackedConversations::pack(size_t first, size_t last) {
  std::vector<int64_t> lengths;
  for (auto i = first; i < last; ++i) lengths.push_back(length_of(samples_[i]));
  for (auto& row : pack_rows_of(lengths, context_)) {
    for (auto& sample : row) sample += first;
    rows_.push_back(std::move(row));
  }
}

int64_t PackedConversations::targets(int64_t sequence) const {
  int64_t count = 0;
  for (const auto sample : rows_[static_cast<size_t>(sequence)])
    count += answers_in(samples_[sample]);
  return count;
}

Batch PackedConversations::read(const std::vector<int64_t>& sequences) const {
  const auto rows = std::ssize(sequences);
  // What is left of a row is a sample of its own, from which nothing is learned.
  Batch batch{.tokens = at::zeros({rows, context_}, at::kLong),
              .targets = at::full({rows, context_}, kNoTarget, at::kLong),
              .positions = at::arange(context_, at::kLong).repeat({rows, 1})};
  for (int64_t row = 0; row < rows; ++row) {
    auto* tokens = batch.tokens.data_ptr<int64_t>() + row * context_;
    auto* targets = batch.targets.data_ptr<int64_t>() + row * context_;
    auto* positions = batch.positions.data_ptr<int64_t>() + row * context_;
    int64_t place = 0;
    for (const auto number : rows_[static_cast<size_t>(sequences[static_cast<size_t>(row)])]) {
      const auto& sample = samples_[number];
      for (size_t i = 0; i + 1 < sample.tokens.size(); ++i, ++place) {
        tokens[place] = sample.tokens[i];
        positions[place] = static_cast<int64_t>(i);
        if (sample.is_answer[i + 1]) targets[place] = sample.tokens[i + 1];
      }
    }
    std::iota(positions + place, positions + context_, int64_t{0});
  }
  return batch;
}

std::string PackedConversations::described() const {
  auto text = counted(std::ssize(samples_), "conversation") + " (" + format_.name() + ") of " +
              counted(tokens_, "token") + " in " + counted(std::ssize(rows_), "row");
  if (cut_ > 0)
    text += "; " + std::to_string(cut_) + " cut at --context " + std::to_string(context_);
  if (left_out_ > 0)
    text += "; " + std::to_string(left_out_) + " left out, whose answers begin behind it";
  return text;
}

}  // namespace tessera::train
