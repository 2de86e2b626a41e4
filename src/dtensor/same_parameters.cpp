#include "dtensor/same_parameters.h"

#include "comm/call_check.h"
#include "dtensor/part.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <sstream>

namespace tessera::dtensor {
namespace {

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::string describe_parameter(const std::string& name, const at::Tensor& parameter) {
  return c10::str(name, " ", parameter.sizes(), " ", parameter.strides(), " ",
                  parameter.scalar_type());
}

std::string describe_part(const at::Tensor& parameter) {
  if (!has_part(parameter)) return {};
  const auto& spec = *part_of(parameter).spec;
  auto text = c10::str(" ", spec.placements, " from");
  for (const auto& chunk :
       local_box(parameter.sizes(), spec.placements, spec.mesh_shape, spec.coordinate))
    text += c10::str(" ", chunk.offset);
  return text;
}

void check_same_parameters(const Compared& own, const Group& group) {
  if (group->getSize() == 1) return;
  auto text = own.whole + "\n";
  for (const auto& line : own.parameters) text += line + "\n";
  const comm::Bookkeeping bookkeeping(own.caller);
  const auto all = gather_bytes(text, group);
  const auto first = split_lines(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto other = split_lines(all[rank]);
    size_t i = 0;
    while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
    TORCH_CHECK(i > 0, own.caller, ": expected the same ", own.kind, " on all ranks, got ",
                first[0], " on rank 0 and ", other[0], " on rank ", rank,
                "; every rank of the group applies it alike, in the same order");
    const auto line = [&](const std::vector<std::string>& lines) {
      return i < lines.size() ? lines[i] : std::string("none");
    };
    TORCH_CHECK(false, own.caller, ": expected the same parameters on all ranks, but parameter ",
                i - 1, " is ", line(first), " on rank 0 (of ", first.size() - 1, ") and ",
                line(other), " on rank ", rank, " (of ", other.size() - 1,
                "); name, sizes, strides and dtype must agree: build the model alike on all ranks");
  }
}

}  // namespace tessera::dtensor
