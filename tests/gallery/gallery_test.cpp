// Each report: what it should give, what PyTorch of the wheel gives, what Tessera gives; and that
// docs/gallery.md says the same. TESSERA_GALLERY=print shows the table, =write puts it on the page.
#include "gallery/cases.h"
#include "gallery/page.h"
#include "support/peer.h"
#include "support/ranks.h"

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iostream>
#include <mutex>

namespace tessera::testing {

std::string text_of(const at::Tensor& tensor) {
  std::ostringstream text;
  const auto values = tensor.detach().to(at::kDouble).contiguous().view({-1});
  for (int64_t i = 0; i < values.numel(); ++i)
    text << (i == 0 ? "" : " ") << values[i].item<double>();
  return text.str();
}

std::string text_of_right(const at::Tensor& values, const at::Tensor& expected) {
  if (values.sizes() != expected.sizes())
    return c10::str("sizes ", values.sizes(), " instead of ", expected.sizes());
  const auto right = at::isclose(values.detach(), expected.detach(), 1e-4, 1e-5).sum();
  return c10::str(right.item<int64_t>(), " of ", expected.numel(), " right");
}

std::string text_or_error(const std::function<std::string()>& run) {
  try {
    return run();
  } catch (const c10::Error& error) {
    return std::string("error: ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("error: ") + error.what();
  }
}

namespace {

std::vector<GalleryCase> all_cases() {
  auto cases = tensor_cases();
  for (auto& which : training_cases()) cases.push_back(std::move(which));
  return cases;
}

/// Equal ranks are one text.
std::string joined(const std::vector<std::string>& by_rank) {
  const bool are_equal = std::all_of(by_rank.begin(), by_rank.end(),
                                     [&](const auto& text) { return text == by_rank[0]; });
  if (are_equal) return by_rank[0];
  std::string text;
  for (size_t rank = 0; rank < by_rank.size(); ++rank)
    text += c10::str(rank == 0 ? "" : "; ", "rank ", rank, ": ", by_rank[rank]);
  return text;
}

std::string text_of_bytes(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.data_ptr()), static_cast<size_t>(bytes.numel())};
}

/// What PyTorch gives for all cases of so many ranks, by report. Run once.
const std::map<std::string, std::string>& pytorch_of(int ranks) {
  static std::map<int, std::map<std::string, std::string>> known;
  const auto found = known.find(ranks);
  if (found != known.end()) return found->second;
  auto& texts = known[ranks];
  const auto results =
      run_peers(ranks, TESSERA_GALLERY_SCRIPT, {}, {.environment = {{"PYTHONHASHSEED", "0"}}});
  for (const auto& [report, bytes] : results[0].tensors) {
    std::vector<std::string> by_rank;
    for (const auto& result : results) {
      const auto text = result.tensors.find(report);
      by_rank.push_back(text == result.tensors.end() ? "nothing" : text_of_bytes(text->second));
    }
    texts[report] = joined(by_rank);
  }
  return texts;
}

/// "2.13"
std::string version() {
  const std::string whole = TORCH_VERSION;
  return whole.substr(0, whole.find('.', whole.find('.') + 1));
}

bool is_pages_version() { return version() == "2.13"; }

std::string mode() {
  const char* given = std::getenv("TESSERA_GALLERY");
  return given == nullptr ? "" : given;
}

/// Rows of cases that were run, in the order of the page.
std::map<size_t, std::string>& lines() {
  static std::map<size_t, std::string> all;
  return all;
}

class Table : public ::testing::Environment {
 public:
  void TearDown() override {
    if (mode() != "print" && mode() != "write") return;
    std::cout << "| report | program | expected | PyTorch " << version()
              << " | Tessera |\n|---|---|---|---|---|\n";
    std::vector<std::string> rows;
    for (const auto& [index, line] : lines()) {
      std::cout << line << "\n";
      rows.push_back(line);
    }
    if (mode() != "write") return;
    ASSERT_EQ(rows.size(), all_cases().size()) << "the page has all cases, so run all";
    ASSERT_FALSE(peer_missing() || !is_pages_version()) << "the page has a column of PyTorch 2.13";
    write_page(rows);
  }
};
const auto* const kTable = ::testing::AddGlobalTestEnvironment(new Table);

class Gallery : public ::testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Report, Gallery, ::testing::Range(size_t{0}, all_cases().size()),
                         [](const auto& info) {
                           auto name = all_cases()[info.param].report;
                           std::erase_if(name, [](unsigned char c) { return !std::isalnum(c); });
                           return name;
                         });

TEST_P(Gallery, GivesWhatOneDeviceGives) {
  const auto which = all_cases()[GetParam()];
  std::vector<std::string> expected(which.ranks), tessera(which.ranks);
  run_threads(which.ranks, [&] {
    const auto shown = which.show();
    expected[run_rank()] = shown.expected;
    tessera[run_rank()] = shown.tessera;
  });
  GalleryRow row{which.what, joined(expected), "not run", joined(tessera)};
  EXPECT_EQ(row.tessera, row.expected) << which.what;
  const bool has_pytorch = !peer_missing();
  if (has_pytorch) {
    const auto& texts = pytorch_of(which.ranks);
    const auto text = texts.find(which.report);
    ASSERT_NE(text, texts.end()) << "tests/gallery/pytorch.py has no case of this report";
    row.pytorch = text->second;
  }
  lines()[GetParam()] = line_of(which.report, which.url, row);
  if (mode() == "write") return;
  const auto page = rows_of_page();
  const auto found = page.find(which.report);
  ASSERT_NE(found, page.end()) << "docs/gallery.md has no row of it; make gallery TABLE=write";
  EXPECT_EQ(found->second.what, row.what) << "docs/gallery.md";
  EXPECT_EQ(found->second.expected, row.expected) << "docs/gallery.md";
  EXPECT_EQ(found->second.tessera, row.tessera) << "docs/gallery.md";
  if (has_pytorch && is_pages_version()) {
    EXPECT_EQ(found->second.pytorch, row.pytorch) << "docs/gallery.md";
  }
}

TEST(GalleryPage, HasARowOfEachReportAndNoOther) {
  if (mode() == "write") GTEST_SKIP() << "is being written";
  auto page = rows_of_page();
  for (const auto& which : all_cases()) EXPECT_EQ(page.erase(which.report), 1) << which.report;
  for (const auto& [report, row] : page) ADD_FAILURE() << "a row of " << report << ", no case";
}

}  // namespace
}  // namespace tessera::testing
