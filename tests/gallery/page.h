#pragma once

#include <map>
#include <string>
#include <vector>

/// The table of docs/gallery.md.
namespace tessera::testing {

struct GalleryRow {
  std::string what;
  std::string expected;
  std::string pytorch;
  std::string tessera;
};

/// By report.
std::map<std::string, GalleryRow> rows_of_page();
/// One line of the table.
std::string line_of(const std::string& report, const std::string& url, const GalleryRow& row);
/// Replaces the rows of the page's table.
void write_page(const std::vector<std::string>& lines);

}  // namespace tessera::testing
