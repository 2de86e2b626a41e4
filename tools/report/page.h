#pragma once

#include "report/run_folder.h"

#include <string>
#include <vector>

namespace tessera::report {

/// One HTML page with all that `runs` hold, its style and its scripts: it asks nothing of the
/// network and may be mailed.
std::string make_page(const std::vector<Run>& runs);

/// The files of page/, put into the program at build time (embed_page.cmake).
struct PageSources {
  const char* html;  // with the marks {{title}}, {{style}}, {{data}} and {{script}}
  const char* style;
  const char* script;
};
PageSources page_sources();

}  // namespace tessera::report
