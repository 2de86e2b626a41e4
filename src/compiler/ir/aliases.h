#pragma once

#include <tessera/compile/graph.h>

#include <vector>

namespace tessera::compiler {

/// Which values of a graph may share memory: views with what they view, results with the arguments
/// that were consumed for them. Pieces of one split overlap the whole but not each other. Different
/// inputs are taken to lie in different memory.
class Aliases {
 public:
  explicit Aliases(const Graph& graph);

  /// Whether two values may have bytes in common.
  bool overlap(ValueId left, ValueId right) const;
  /// Whether two values surely are the same bytes with the same layout.
  bool same_place(ValueId left, ValueId right) const { return place(left) == place(right); }
  /// The values that may overlap this one, itself included.
  std::vector<ValueId> overlapping(ValueId value) const;
  /// The inputs in whose memory the value lies, or may lie.
  const std::vector<ValueId>& inputs(ValueId value) const;

  bool is_defined(ValueId value) const { return region_.at(static_cast<size_t>(value)) != -1; }
  /// Numbers of the memory and of the place in it, equal for values that share them.
  size_t memory(ValueId value) const;
  size_t place(ValueId value) const {
    return static_cast<size_t>(place_.at(static_cast<size_t>(value)));
  }
  size_t memory_count() const { return roots_.size(); }
  size_t place_count() const { return static_cast<size_t>(places_); }

 private:
  struct Region {
    int parent = -1;
    int root = 0;
    int split = -1;  // regions of one split do not overlap each other
  };
  struct Root {
    int merged_into = -1;
    bool is_vague = false;  // of several memories: everything in it may overlap
    std::vector<ValueId> values = {};
    std::vector<ValueId> inputs = {};
  };

  void add(const Node& node);
  void add_view(const Node& node);
  void put(ValueId value, int region, int place);
  int new_region(int parent, int split);
  int root_of(int region) const;
  int merge(const std::vector<ValueId>& bases);

  std::vector<Region> regions_;
  std::vector<Root> roots_;
  std::vector<int> region_;  // by value; -1: not defined
  std::vector<int> place_;   // by value
  int places_ = 0;
  int splits_ = 0;
};

}  // namespace tessera::compiler
