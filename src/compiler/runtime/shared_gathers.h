#pragma once

#include <tessera/compile/graph.h>

#include "comm/group_memory.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

namespace tessera::compiler {

/// Gathers of a program whose results may be seen in place, where the gathered tensors are parts of
/// shared memory.
///
/// Note [seen in place]: an all-gather of inputs that the ranks keep as parts of one shared whole
/// (see comm/group_memory.h) moves nothing: its results are the whole. That is right if nobody
/// writes them, they do not leave the program, and their last reader comes before the first node
/// that writes the inputs. All ranks run the same program, so they come to the gates alike: to
/// `Written` before a run's first look at a memory, to `Read` behind the last reader of each
/// gather, and whoever writes waits there for the others.
class SharedGathers {
 public:
  explicit SharedGathers(const Graph& graph);

  bool is_empty() const { return gathers_.empty(); }
  void begin();
  /// Results of the gather at `node`, if it is one that can be seen in place: undefined where the
  /// tensor must travel. Empty if all must.
  std::vector<at::Tensor> open(size_t node, const std::vector<at::Tensor>& parts);
  /// The node is about to run: readers before it have ended.
  void reach(size_t node) {
    if (node > next_end_) end_reading(node);
  }
  /// The value is about to be written.
  void before_write(ValueId value);
  void end();

 private:
  struct Gather {
    size_t last_reader;
    std::vector<bool> is_candidate;  // by tensor
    std::vector<ValueType> types;    // of the results
    std::string group;
    bool writes_at_end = false;  // inputs are overwritten when the program has ended
  };
  struct Open {
    size_t gather;  // node
    std::shared_ptr<comm::GroupMemory> memory;
    size_t last_reader;
    bool has_ended = false;
  };

  void end_reading(size_t node);

  std::unordered_map<size_t, Gather> gathers_;                   // by node
  std::unordered_map<ValueId, std::vector<size_t>> written_by_;  // value: gathers of its memory
  std::vector<Open> open_;
  std::vector<const comm::GroupMemory*> seen_;  // in this run
  size_t next_end_ = SIZE_MAX;
};

}  // namespace tessera::compiler
