#pragma once

#include <tessera/compile/graph.h>

#include "compiler/kernels/kernels.h"

#include <string>
#include <vector>

namespace tessera::compiler {

/// A program as a reader sees it: operators have their names of PyTorch, values the names that
/// users gave them. Equal graphs give equal text. The graph outlives it.
class Listing {
 public:
  explicit Listing(const Graph& graph);

  /// The sources of its kernels, then its instructions in order, one line each.
  std::string text() const;

  struct Line {
    std::vector<std::string> operators;  // of a kernel: what it computes, one by one
    std::string call;
  };
  Line instruction(size_t node) const;
  /// "return loss", "weight.grad = t_2"; none of writes that a kernel has done in place.
  std::vector<std::string> outputs() const;

  const std::string& name(ValueId value) const { return names_.at(static_cast<size_t>(value)); }
  const KernelSources& kernels() const { return kernels_; }
  /// By value: see in_place_targets().
  const std::vector<ValueId>& in_place() const { return in_place_; }

 private:
  std::string names_of(const std::vector<ValueId>& values) const;
  std::string note_of(const std::vector<ValueId>& values) const;
  Line kernel_line(size_t node) const;

  const Graph& graph_;
  const KernelSources kernels_;
  const std::vector<std::string> names_;
  const std::vector<ValueId> in_place_;
};

std::string program_text(const Graph& graph);

}  // namespace tessera::compiler
