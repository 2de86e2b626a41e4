#pragma once

#include "compiler/runtime/program.h"

namespace tessera::compiler {

/// A program that stops at tessera::next_iteration, and goes on when it is asked to; see Note [next
/// iteration]. What the second part reads is as it was when the first one stopped, but for inputs
/// that it writes itself.
class SplitProgram {
 public:
  /// Null if nothing can be put off: the graph has no mark, returns what comes behind it, or has
  /// something there that can't be kept for it.
  static std::unique_ptr<SplitProgram> make(const Graph& graph, const std::vector<Launch>& kernels);

  /// Whether this output of the graph is made by the second part.
  bool is_late(size_t output) const { return is_late_[output]; }
  /// Up to the mark. Values of the graph's outputs, in their order; none for late ones.
  std::vector<at::Tensor> begin(const std::vector<at::Tensor>& inputs);
  bool has_begun() const { return !live_.empty(); }
  /// Inputs of the graph that finish() writes, by their places; it may not be called twice.
  const std::vector<at::Tensor>& written() const { return live_; }
  /// From the mark on. Values of late outputs; none for the others.
  std::vector<at::Tensor> finish();

 private:
  /// Where the second part has an input from.
  struct Source {
    bool is_carried;  // out of the first part
    size_t place;     // among the graph's inputs, or what is carried
  };
  struct Parts {
    Graph first, rest;
    std::vector<bool> is_late;
    std::vector<Source> sources;
  };
  static Parts split(const Graph& graph, size_t mark);
  static bool can_be_kept(const Graph& graph, const Parts& parts);
  SplitProgram(Parts parts, std::vector<Launch> first, std::vector<Launch> rest);

  std::vector<bool> is_late_;    // by output of the graph
  std::vector<Source> sources_;  // by input of the second part
  Program first_, rest_;
  // Between the two parts.
  std::vector<at::Tensor> live_;     // inputs of the graph, undefined where nothing is written
  std::vector<at::Tensor> carried_;  // what the first part has computed for the second
};

}  // namespace tessera::compiler
