#pragma once

#include <tessera/compile/graph.h>

#include <vector>

/// Which memory the values of a graph lie in, who reads and writes it, and how long. Every pass and
/// the lowering ask here. Of a moment: it does not follow changes of the graph, but for join().
namespace tessera::compiler {

/// Where values are defined and used, by index of the node.
class Uses {
 public:
  explicit Uses(const Graph& graph);

  static constexpr int kInput = -1;
  int definition(ValueId value) const { return definitions_.at(static_cast<size_t>(value)); }
  /// In order, each once; end() stands for the outputs.
  const std::vector<int>& users(ValueId value) const {
    return users_.at(static_cast<size_t>(value));
  }
  int last(ValueId value) const {
    return users(value).empty() ? definition(value) : users(value).back();
  }
  int end() const { return end_; }

 private:
  std::vector<int> definitions_;
  std::vector<std::vector<int>> users_;
  int end_;
};

/// Values may share memory: views with what they view, results with the arguments that were
/// consumed for them. Pieces of one split overlap the whole but not each other. Different inputs
/// are taken to lie in different memory.
class MemoryAnalysis {
 public:
  explicit MemoryAnalysis(const Graph& graph);

  const Uses& uses() const { return uses_; }
  /// The last node that reads the value: collectives read what they were given until somebody has
  /// waited for them.
  int last_read(ValueId value) const { return last_reads_.at(static_cast<size_t>(value)); }

  /// Whether two values may have bytes in common.
  bool overlap(ValueId left, ValueId right) const;
  /// Whether two values surely are the same bytes with the same layout.
  bool same_place(ValueId left, ValueId right) const { return place(left) == place(right); }
  /// Whether the node writes, in place, what may be a byte of one of the values.
  bool overwrites(const Node& node, const std::vector<ValueId>& values) const;
  /// The values that may overlap this one, itself included.
  std::vector<ValueId> overlapping(ValueId value) const;
  /// The values in the same memory, overlapping or not.
  const std::vector<ValueId>& neighbours(ValueId value) const {
    return memories_[memory(value)].values;
  }
  /// The inputs in whose memory the value lies, or may lie.
  const std::vector<ValueId>& inputs(ValueId value) const {
    return memories_[memory(value)].inputs;
  }
  /// A number of the memory, equal for values that share it.
  size_t memory(ValueId value) const;

  /// Whether the value, or one that overlaps it, is
  bool is_consumed(ValueId value) const { return consumed_.at(static_cast<size_t>(value)); }
  /// … given to the caller: a result or a gradient,
  bool is_returned(ValueId value) const { return returned_.at(static_cast<size_t>(value)); }
  /// … copied into an input at the end.
  bool is_written(ValueId value) const { return written_.at(static_cast<size_t>(value)); }

  /// A pass has put `value`, with all that overlaps it, where `home` lies.
  void join(ValueId value, ValueId home);
  /// A pass gives the value to the caller.
  void mark_returned(ValueId value) { returned_.at(static_cast<size_t>(value)) = true; }

 private:
  /// A part of a memory.
  struct Region {
    int parent = -1;
    int memory = 0;
    int split = -1;  // regions of one split do not overlap each other
  };
  struct Memory {
    int merged_into = -1;   // a view is of both
    int joined_to = -1;     // by join()
    bool is_vague = false;  // of several: everything in it may overlap
    std::vector<ValueId> values = {};
    std::vector<ValueId> inputs = {};
  };

  void add(const Node& node);
  void add_view(const Node& node);
  void put(ValueId value, int region, int place);
  int new_region(int parent, int split);
  int new_place();
  int memory_of(int region) const;
  size_t joined(int memory) const;
  void add_contents(int from, int to);
  int merge(const std::vector<ValueId>& bases);
  size_t place(ValueId value) const;
  void find_last_reads(const Graph& graph);
  void find_ends(const Graph& graph);

  const Uses uses_;
  std::vector<int> last_reads_;
  std::vector<Region> regions_;
  std::vector<Memory> memories_;
  std::vector<int> region_;         // by value; -1: not defined
  std::vector<int> place_;          // by value
  std::vector<size_t> same_place_;  // by place: another that is the same, or itself
  int splits_ = 0;
  std::vector<bool> consumed_, returned_, written_;  // by value
};

/// By node: the values that nothing uses after it. Neither inputs nor outputs of the graph.
std::vector<std::vector<ValueId>> last_uses(const Graph& graph);

}  // namespace tessera::compiler
