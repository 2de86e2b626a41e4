#include "adopt/unified_diff.h"

#include "base/text.h"

#include <string_view>

namespace tessera::adopt {
namespace {

constexpr std::size_t kAround = 3;

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const auto end = text.find('\n');
    const auto size = end == std::string_view::npos ? text.size() : end + 1;
    lines.emplace_back(text.substr(0, size));
    text.remove_prefix(size);
  }
  return lines;
}

struct Change {
  std::size_t line;   // of the text, from 0
  std::size_t count;  // lines that go
  std::vector<std::string> added;
};

/// Edits by lines. No edit takes a line's end away, so lines stay beside each other.
std::vector<Change> changes_of(const std::vector<std::string>& lines,
                               const std::vector<Edit>& edits) {
  std::vector<Change> changes;
  std::size_t begin = 0;
  auto edit = edits.begin();
  for (std::size_t line = 0; line < lines.size() && edit != edits.end(); ++line) {
    const auto end = begin + lines[line].size();
    const bool is_last = line + 1 == lines.size();
    std::vector<Edit> inside;
    for (; edit != edits.end() && (edit->offset < end || is_last); ++edit)
      inside.push_back({edit->offset - begin, edit->length, edit->text});
    begin = end;
    if (inside.empty()) continue;
    Change change{line, 1, lines_of(apply_edits(lines[line], inside))};
    if (change.added.back() == lines[line]) {  // lines came before it
      change.added.pop_back();
      change.count = 0;
    } else if (change.added.front() == lines[line]) {
      change.added.erase(change.added.begin());
      change = {line + 1, 0, std::move(change.added)};
    }
    changes.push_back(std::move(change));
  }
  if (lines.empty() && !edits.empty()) changes.push_back({0, 0, lines_of(apply_edits("", edits))});
  return changes;
}

void add_line(std::string& diff, char mark, const std::string& line) {
  diff += mark + line;
  if (!line.ends_with('\n')) diff += "\n\\ No newline at end of file\n";
}

std::string range(std::size_t first, std::size_t count) {
  const auto shown = count == 0 ? first : first + 1;  // an empty one is named by the line before
  return std::to_string(shown) + (count == 1 ? "" : "," + std::to_string(count));
}

}  // namespace

std::string unified_diff(const std::string& name, const std::string& text,
                         const std::vector<Edit>& edits) {
  const auto lines = lines_of(text);
  const auto changes = changes_of(lines, edits);
  const auto shown = printable(name.starts_with('/') ? name.substr(1) : name);
  std::string diff = "--- a/" + shown + "\n+++ b/" + shown + "\n";
  std::size_t shift = 0;  // lines added so far
  for (std::size_t first = 0; first < changes.size();) {
    auto last = first;
    while (last + 1 < changes.size() &&
           changes[last + 1].line <= changes[last].line + changes[last].count + 2 * kAround)
      ++last;
    const auto begin = changes[first].line - std::min(kAround, changes[first].line);
    const auto end = std::min(lines.size(), changes[last].line + changes[last].count + kAround);
    std::string body;
    auto line = begin;
    std::size_t added = 0;
    std::size_t removed = 0;
    for (; first <= last; ++first) {
      for (; line < changes[first].line; ++line) add_line(body, ' ', lines[line]);
      for (std::size_t i = 0; i < changes[first].count; ++i) add_line(body, '-', lines[line++]);
      for (const auto& text_added : changes[first].added) add_line(body, '+', text_added);
      added += changes[first].added.size();
      removed += changes[first].count;
    }
    for (; line < end; ++line) add_line(body, ' ', lines[line]);
    diff += "@@ -" + range(begin, end - begin) + " +" +
            range(begin + shift, end - begin + added - removed) + " @@\n" + body;
    shift += added - removed;
  }
  return diff;
}

std::string coloured(const std::string& diff) {
  std::string text;
  for (const auto& line : lines_of(diff)) {
    const bool is_header = line.starts_with("--- ") || line.starts_with("+++ ");
    const char* colour = is_header               ? "\033[1m"
                         : line.starts_with("@") ? "\033[36m"
                         : line.starts_with("-") ? "\033[31m"
                         : line.starts_with("+") ? "\033[32m"
                                                 : "";
    const auto shown = printable(line.substr(0, line.find_last_not_of("\r\n") + 1), "\t");
    text += colour + shown + (*colour == '\0' ? "" : "\033[m") + "\n";
  }
  return text;
}

}  // namespace tessera::adopt
