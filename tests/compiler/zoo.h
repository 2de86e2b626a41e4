#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace tessera::testing {

/// A small model of some kind, and what it takes.
struct ZooModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<torch::Tensor(const torch::Tensor&)> forward;
};

struct ZooEntry {
  const char* name;
  std::vector<int64_t> input;  // sizes of one sample
  bool takes_words = false;    // integers below kZooWords
  ZooModel (*make)();
};
constexpr int64_t kZooWords = 11;
inline void PrintTo(const ZooEntry& entry, std::ostream* out) { *out << entry.name; }  // NOLINT

/// From MLPs to conv nets, recurrent cells and transformers.
const std::vector<ZooEntry>& zoo();

}  // namespace tessera::testing
