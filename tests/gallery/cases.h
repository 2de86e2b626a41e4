#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

/// Reports of silently wrong numbers and of hangs in other systems, as small programs.
namespace tessera::testing {

/// What one rank has to show, as text.
struct Shown {
  std::string expected;  // by plain tensors on this rank alone
  std::string tessera;
};

struct GalleryCase {
  std::string report;  // "pytorch 179502": who, and which report
  std::string url;
  std::string what;  // the program, in a few words
  int ranks;
  std::function<Shown()> show;  // runs on every rank, after init
};

/// In the order of the page.
std::vector<GalleryCase> tensor_cases();
std::vector<GalleryCase> training_cases();

/// "0 1.5 -2": all elements in their order.
std::string text_of(const at::Tensor& tensor);
/// "90 of 96 right"; "sizes [2] instead of [3]" where these differ.
std::string text_of_right(const at::Tensor& values, const at::Tensor& expected);
/// What the function gives, or "error: " and how its text begins.
std::string text_or_error(const std::function<std::string()>& run);

}  // namespace tessera::testing
