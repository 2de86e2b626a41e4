#include "train_kernels.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <regex>

namespace tessera::benchmarks {
namespace {

constexpr size_t kLongestName = 110;
constexpr const char* kFolder = "benchmarks/results";

struct Sum {
  int64_t count = 0;
  double milliseconds = 0;

  Sum& operator+=(const Sum& other) {
    count += other.count;
    milliseconds += other.milliseconds;
    return *this;
  }
};

struct KernelRow {
  std::string name;  // whole: short ones may be equal
  Sum ours, theirs;
};

std::vector<KernelRow> rows_of(const std::vector<Kernel>& ours, const std::vector<Kernel>& theirs) {
  std::map<std::string, KernelRow> by_name;
  for (const auto& each : ours) by_name[each.name].ours += {1, each.microseconds / 1e3};
  for (const auto& each : theirs) by_name[each.name].theirs += {1, each.microseconds / 1e3};
  std::vector<KernelRow> rows;
  for (auto& [name, row] : by_name) rows.push_back({name, row.ours, row.theirs});
  std::ranges::sort(rows, {}, [](const KernelRow& row) {
    return std::pair(row.ours.count == row.theirs.count,
                     -std::max(row.ours.milliseconds, row.theirs.milliseconds));
  });
  return rows;
}

std::string line_of(const Sum& ours, const Sum& theirs, const std::string& name) {
  char numbers[96];
  std::snprintf(numbers, sizeof numbers, "%7lld %9.3f  %7lld %9.3f  ",
                static_cast<long long>(ours.count), ours.milliseconds,
                static_cast<long long>(theirs.count), theirs.milliseconds);
  return numbers + name + "\n";
}

/// Milliseconds from the first to the end of the last.
double span_of(const std::vector<Kernel>& kernels) {
  double end = 0;
  for (const auto& kernel : kernels) end = std::max(end, kernel.begin + kernel.microseconds);
  return end / 1e3;
}

/// Where the arguments begin, which end the name.
size_t arguments_of(const std::string& name) {
  if (!name.ends_with(')')) return std::string::npos;
  int depth = 0, closed = 0;
  for (size_t at = name.size(); at-- > 0;) {
    const char c = name[at];
    if (c == '>') ++depth;
    if (c == '<') --depth;
    if (depth != 0) continue;
    if (c == ')') ++closed;
    if (c == '(' && --closed == 0) return at;
  }
  return std::string::npos;
}

}  // namespace

std::string short_kernel_name(const std::string& name) {
  static const std::regex kNamespaces(
      R"((\(anonymous namespace\)|<unnamed>|[A-Za-z_][A-Za-z_0-9]*)::)");
  auto text = name;
  // "Memcpy HtoD (Pinned -> Device)" has no arguments.
  if (!text.starts_with("Mem")) text = text.substr(0, arguments_of(text));
  if (text.starts_with("void ")) text.erase(0, 5);
  text = std::regex_replace(text, kNamespaces, "");
  text = std::regex_replace(text, std::regex(" >"), ">");
  return text.size() <= kLongestName ? text : text.substr(0, kLongestName - 3) + "...";
}

std::string kernel_table(const std::vector<Kernel>& ours, const std::vector<Kernel>& theirs,
                         const std::string& peer) {
  std::string table = "kernels of one step: Tessera, then " + peer +
                      "; those that one side launches more often first\n"
                      "  count        ms    count        ms  kernel\n";
  Sum all_ours, all_theirs;
  for (const auto& row : rows_of(ours, theirs)) {
    table += line_of(row.ours, row.theirs, short_kernel_name(row.name));
    all_ours += row.ours;
    all_theirs += row.theirs;
  }
  // The rest of this is time in which none ran.
  return table + line_of(all_ours, all_theirs, "all") +
         line_of({1, span_of(ours)}, {1, span_of(theirs)}, "from the first to the last");
}

void write_kernels(const std::string& what, const std::string& table) {
  std::cout << what << ": " << table << std::endl;
  if (!std::filesystem::is_directory(kFolder)) return;
  const auto now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%d", &local);
  const auto path = std::string(kFolder) + "/" + date + "-kernels-" + what + ".txt";
  std::ofstream(path) << table;
  std::cerr << "written to " << path << std::endl;
}

}  // namespace tessera::benchmarks
