#include "report/html.h"

#include <string_view>

namespace tessera::report {
namespace {

/// JSON inside a <script>: with no '<' in it nothing can end the element or open a comment.
std::string script_json(const nlohmann::ordered_json& value) {
  const std::string text =
      value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  std::string safe;
  safe.reserve(text.size());
  for (const char letter : text) {
    if (letter == '<') {
      safe += "\\u003c";
    } else {
      safe += letter;
    }
  }
  return safe;
}

std::string escape_html(std::string_view text) {
  std::string safe;
  for (const char letter : text) {
    switch (letter) {
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '&':
        safe += "&amp;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += letter;
    }
  }
  return safe;
}

std::string sections_html(const std::vector<std::string>& ids) {
  std::string html;
  for (const auto& id : ids) html += "  <section id=\"" + id + "\" hidden></section>\n";
  return html;
}

/// Each mark is looked for behind the text of the last one, never inside it.
std::string fill(std::string_view page,
                 std::initializer_list<std::pair<std::string_view, std::string_view>> texts) {
  std::string filled;
  for (const auto& [mark, text] : texts) {
    const auto at = page.find(mark);
    filled += page.substr(0, at);
    filled += text;
    page.remove_prefix(at + mark.size());
  }
  filled += page;
  return filled;
}

}  // namespace

std::string write_page(const Page& page) {
  return fill(page_html(), {{"{{title}}", escape_html(page.title)},
                            {"{{style}}", page_style()},
                            {"{{sections}}\n", sections_html(page.sections)},
                            {"{{command}}", escape_html(page.command)},
                            {"{{data}}", script_json(page.data)},
                            {"{{script}}", common_script() + std::string(page.script)}});
}

}  // namespace tessera::report
