#pragma once

#include "compiler/ir/aliases.h"

#include <vector>

namespace tessera::compiler {

/// Which values share memory while a pass puts results into the memory of arguments.
class JoinedMemory {
 public:
  explicit JoinedMemory(const Graph& graph);

  /// From now on `value`, with all that overlaps it, lies where `home` lies.
  void join(ValueId value, ValueId home);

  bool overlap(ValueId left, ValueId right) const;
  bool same_place(ValueId left, ValueId right) const;
  /// The values in the same memory, overlapping or not.
  const std::vector<ValueId>& neighbours(ValueId value) const { return values_[find(value)]; }
  const std::vector<ValueId>& inputs(ValueId value) const { return inputs_[find(value)]; }

 private:
  size_t find(ValueId value) const;
  size_t find_place(ValueId value) const;

  Aliases aliases_;
  std::vector<size_t> memory_;                // by memory of aliases_: joined to which
  std::vector<size_t> place_;                 // by place of aliases_: the same as which
  std::vector<std::vector<ValueId>> values_;  // by memory
  std::vector<std::vector<ValueId>> inputs_;  // by memory
};

}  // namespace tessera::compiler
