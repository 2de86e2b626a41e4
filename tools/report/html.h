#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace tessera::report {

/// A page that draws itself from data.
struct Page {
  std::string title;
  std::string command;                // that writes it: "tessera report"
  std::vector<std::string> sections;  // ids of what `script` fills, in order
  nlohmann::ordered_json data = {};   // that it finds in #data
  const char* script = "";            // runs behind common_script()
};

/// One HTML page with all that it holds, its style and its scripts: it asks nothing of the network
/// and may be mailed.
std::string write_page(const Page& page);

// The files of page/, put into the program at build time (embed_text.cmake).
const char* page_html();  // with the marks {{title}}, {{style}}, {{sections}} …
const char* page_style();
const char* common_script();
const char* report_script();
const char* program_script();  // of `tessera inspect --program`

}  // namespace tessera::report
