#include "gallery/page.h"

#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace tessera::testing {
namespace {

constexpr const char* kRow = "| [";  // a row of the table begins with the link to its report

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(' ');
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream parts(line.substr(1));
  for (std::string cell; std::getline(parts, cell, '|');) cells.push_back(trimmed(cell));
  return cells;
}

std::vector<std::string> lines_of_page() {
  std::ifstream file(TESSERA_GALLERY_PAGE);
  if (!file) throw std::runtime_error("gallery: cannot read " TESSERA_GALLERY_PAGE);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::map<std::string, GalleryRow> rows_of_page() {
  std::map<std::string, GalleryRow> rows;
  for (const auto& line : lines_of_page()) {
    if (!line.starts_with(kRow)) continue;
    const auto cells = cells_of(line);
    if (cells.size() != 5)
      throw std::runtime_error("gallery: expected five cells in this row: " + line);
    const auto report = cells[0].substr(1, cells[0].find(']') - 1);
    const bool is_new =
        rows.emplace(report, GalleryRow{cells[1], cells[2], cells[3], cells[4]}).second;
    if (!is_new) throw std::runtime_error("gallery: two rows of " + report);
  }
  return rows;
}

std::string line_of(const std::string& report, const std::string& url, const GalleryRow& row) {
  return "| [" + report + "](" + url + ") | " + row.what + " | " + row.expected + " | " +
         row.pytorch + " | " + row.tessera + " |";
}

void write_page(const std::vector<std::string>& lines) {
  std::vector<std::string> page;
  bool is_written = false;
  for (const auto& line : lines_of_page()) {
    if (line.starts_with(kRow)) continue;
    page.push_back(line);
    if (!line.starts_with("|---") || is_written) continue;
    page.insert(page.end(), lines.begin(), lines.end());
    is_written = true;
  }
  if (!is_written) throw std::runtime_error("gallery: no table in " TESSERA_GALLERY_PAGE);
  std::ofstream file(TESSERA_GALLERY_PAGE);
  for (const auto& line : page) file << line << "\n";
  if (!file) throw std::runtime_error("gallery: cannot write " TESSERA_GALLERY_PAGE);
}

}  // namespace tessera::testing
