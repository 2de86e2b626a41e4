#include "dtensor/agreement.h"

#include "comm/call_check.h"
#include "comm/type_names.h"
#include "dtensor/collectives.h"
#include "dtensor/part.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <sstream>
#include <string>

namespace tessera::dtensor {
namespace {

/// What a rank says: dtype, sizes and placements, or what is wrong.
constexpr char kWrong = -1;

std::string encode(c10::IntArrayRef sizes, c10::ScalarType dtype, const Placements& placements) {
  std::string bytes = {static_cast<char>(dtype), static_cast<char>(sizes.size())};
  bytes.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
  return bytes + c10::str(placements);
}

Sizes decode(const std::string& bytes) {
  Sizes sizes(static_cast<size_t>(bytes[1]));
  std::memcpy(sizes.data(), bytes.data() + 2, sizes.size() * sizeof(int64_t));
  return sizes;
}

std::string placements_in(const std::string& bytes) {
  return bytes.substr(2 + static_cast<size_t>(bytes[1]) * sizeof(int64_t));
}

std::string dtype_in(const std::string& bytes) {
  return comm::name_of_dtype(static_cast<c10::ScalarType>(bytes[0]));
}

/// `ranks`: those of the job whose parts these are.
void check_alike(const std::vector<std::string>& parts, const std::vector<int>& ranks) {
  for (size_t index = 0; index < parts.size(); ++index) {
    TORCH_CHECK_VALUE(parts[index][0] == parts[0][0],
                      "DTensor::from_local: expected one dtype on all ranks, got ",
                      dtype_in(parts[0]), " on rank ", ranks[0], " and ", dtype_in(parts[index]),
                      " on rank ", ranks[index]);
    TORCH_CHECK_VALUE(parts[index][1] == parts[0][1],
                      "DTensor::from_local: expected parts of one number of dimensions on all ",
                      "ranks, got sizes ", c10::IntArrayRef(decode(parts[0])), " on rank ",
                      ranks[0], " and ", c10::IntArrayRef(decode(parts[index])), " on rank ",
                      ranks[index]);
    TORCH_CHECK_VALUE(placements_in(parts[index]) == placements_in(parts[0]),
                      "DTensor::from_local: the ranks disagree: rank ", ranks[0],
                      " passes placements ", placements_in(parts[0]), ", rank ", ranks[index],
                      " passes placements ", placements_in(parts[index]),
                      "; they must be alike on all ranks of the mesh");
  }
}

/// Parts along one mesh dimension -> what they make up.
Sizes join_sizes(const std::vector<std::string>& parts, const std::vector<int>& ranks,
                 const Placement& placement) {
  check_alike(parts, ranks);
  auto joined = decode(parts[0]);
  const bool is_cut = placement.is_shard();
  if (is_cut) {
    joined[placement.dim()] = 0;
    for (const auto& part : parts) joined[placement.dim()] += decode(part)[placement.dim()];
  }
  for (size_t index = 0; index < parts.size(); ++index) {
    auto expected = joined;
    if (is_cut) {
      expected[placement.dim()] =
          chunk_of(joined[placement.dim()], static_cast<int64_t>(parts.size()),
                   static_cast<int64_t>(index))
              .length;
    }
    TORCH_CHECK_VALUE(decode(parts[index]) == expected,
                      "DTensor::from_local: expected a part of sizes ", c10::IntArrayRef(expected),
                      " on rank ", ranks[index], " of the mesh dimension placed ",
                      c10::str(placement), ", got ", c10::IntArrayRef(decode(parts[index])),
                      "; chunks are ceil(size / ranks) long, the last one what is left");
  }
  return joined;
}

/// What the ranks of a group say; the first that is wrong goes into `wrong`.
std::vector<std::string> exchange(const std::string& sizes, std::string& wrong,
                                  const Group& group) {
  auto said = gather_bytes(wrong.empty() ? sizes : kWrong + wrong, group);
  for (const auto& bytes : said) {
    if (bytes[0] == kWrong && wrong.empty()) wrong = bytes.substr(1);
  }
  return said;
}

/// What all ranks of the mesh have to pass alike, as text; goes into `wrong` if it differs.
void compare(const char* caller, const std::string& mine, const Spec& spec, std::string& wrong) {
  for (const auto& group : spec.groups) {
    const auto said = exchange(mine, wrong, group);
    const auto in_world = ranks(group);
    for (size_t rank = 0; rank < said.size() && wrong.empty(); ++rank) {
      if (said[rank] == said[0]) continue;
      wrong = c10::str(caller, ": the ranks disagree: rank ", in_world[0], " passes ", said[0],
                       ", rank ", in_world[rank], " passes ", said[rank],
                       "; they must be alike on all ranks of the mesh");
    }
  }
}

}  // namespace

Sizes agreed_sizes(const at::Tensor& local, const Spec& spec, std::string wrong) {
  for (const auto& placement : spec.placements) {
    TORCH_CHECK_NOT_IMPLEMENTED(!placement.is_strided(),
                                "DTensor::from_local: run_check can't join ", c10::str(placement),
                                "; pass shape and stride");
  }
  auto sizes = local.sizes().vec();
  const comm::Bookkeeping bookkeeping("DTensor::from_local");
  // What is wrong is passed on along the other mesh dimensions before anybody throws.
  for (size_t dim = spec.placements.size(); dim-- > 0;) {
    const auto parts =
        exchange(encode(sizes, local.scalar_type(), spec.placements), wrong, spec.groups[dim]);
    if (!wrong.empty()) continue;
    try {
      sizes = join_sizes(parts, ranks(spec.groups[dim]), spec.placements[dim]);
    } catch (const c10::ValueError& error) {
      wrong = error.what_without_backtrace();
    }
  }
  TORCH_CHECK_VALUE(wrong.empty(), wrong);
  return sizes;
}

at::Tensor agreed_values(const at::Tensor& local, const Spec& spec) {
  auto values = without_bits(local.detach());
  for (size_t dim = 0; dim < spec.placements.size(); ++dim) {
    if (!spec.placements[dim].is_replicate() || spec.mesh_shape[dim] == 1) continue;
    values = broadcast_from(values, 0, spec.groups[dim]).wait();
  }
  return values;
}

void check_same(const char* caller, const at::Tensor& tensor, const Spec& spec, int source) {
  // Told as text: it is what the error shows, and what is not in it need not be alike.
  const auto mine = c10::str(
      "sizes ", tensor.sizes(), " of ", comm::name_of_dtype(tensor.scalar_type()), " as ",
      spec.placements, " from rank ", source, " on a mesh of ", c10::IntArrayRef(spec.mesh_shape));
  const comm::Bookkeeping bookkeeping(caller);
  std::string wrong;
  compare(caller, mine, spec, wrong);
  TORCH_CHECK_VALUE(wrong.empty(), wrong);
}

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
