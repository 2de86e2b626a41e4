#include "report/page.h"

#include "report/html.h"
#include "report/page_data.h"

namespace tessera::report {
namespace {

std::string title_of(const std::vector<Run>& runs) {
  if (runs.size() == 1) return runs[0].name + " · Tessera";
  return std::to_string(runs.size()) + " runs · Tessera";
}

}  // namespace

std::string make_page(const std::vector<Run>& runs) {
  return write_page({.title = title_of(runs),
                     .command = "tessera report",
                     .sections = {"notes", "summary", "curves", "sample", "timeline", "sharding",
                                  "configuration", "program"},
                     .data = page_data(runs),
                     .script = report_script()});
}

}  // namespace tessera::report
