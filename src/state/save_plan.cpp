#include "state/save_plan.h"

#include "base/crc32c.h"
#include "state/files/json_text.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

namespace tessera::state {
namespace {

struct HeldTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  size_t first_rank = 0;                     // that told of it
  bool may_differ = false;                   // see Note [copies]
  std::map<Box, std::vector<size_t>> boxes;  // and the ranks that hold each
};

/// A box that some rank has to write.
struct Task {
  const std::string* name;
  const Box* box;
  const std::vector<size_t>* ranks;  // in order
  bool may_differ;
  uint64_t bytes;
};

void read_description(const std::string& function, const Json& description, size_t rank,
                      std::map<std::string, HeldTensor>& tensors) {
  for (const auto& item : description["tensors"]) {
    const auto name = item["name"].get<std::string>();
    const auto dtype = static_cast<c10::ScalarType>(item["dtype"].get<int>());
    const auto shape = item["shape"].get<std::vector<int64_t>>();
    auto [found, is_new] = tensors.try_emplace(name);
    auto& tensor = found->second;
    if (is_new) {
      tensor.dtype = dtype;
      tensor.shape = shape;
      tensor.first_rank = rank;
      tensor.may_differ = item["may_differ"].get<bool>();
    }
    TORCH_CHECK_VALUE(tensor.dtype == dtype && tensor.shape == shape, function, ": expected '",
                      name, "' to be of one shape and dtype on all ranks, got ",
                      c10::IntArrayRef(tensor.shape), " ", c10::toString(tensor.dtype), " on rank ",
                      tensor.first_rank, " and ", c10::IntArrayRef(shape), " ",
                      c10::toString(dtype), " on rank ", rank,
                      "; all ranks of the group have to save one model");
    for (const auto& box : item["boxes"]) {
      tensor.boxes[{box[0].get<std::vector<int64_t>>(), box[1].get<std::vector<int64_t>>()}]
          .push_back(rank);
    }
  }
}

void check_complete(const std::string& function, const std::map<std::string, HeldTensor>& tensors) {
  for (const auto& [name, tensor] : tensors) {
    std::vector<Box> boxes;
    for (const auto& [box, ranks] : tensor.boxes) boxes.push_back(box);
    TORCH_CHECK_VALUE(is_grid(tensor.shape, boxes), function, ": expected the ranks' parts of '",
                      name, "' to make up the whole of shape ", c10::IntArrayRef(tensor.shape),
                      ", got parts that overlap or leave gaps; save from a group that has all "
                      "ranks of the tensor's mesh, with the same layout on all");
  }
}

/// Those without a choice of rank first, then the largest.
std::vector<Task> tasks_in_order(const std::map<std::string, HeldTensor>& tensors) {
  std::vector<Task> tasks;
  for (const auto& [name, tensor] : tensors) {
    for (const auto& [box, ranks] : tensor.boxes) {
      const auto bytes = static_cast<uint64_t>(volume(box.length)) * c10::elementSize(tensor.dtype);
      tasks.push_back({&name, &box, &ranks, tensor.may_differ, bytes});
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& left, const Task& right) {
    return std::pair(left.may_differ, left.bytes) > std::pair(right.may_differ, right.bytes);
  });
  return tasks;
}

/// The name of a part in a file: as Python would cut it, "up.weight[0:64,0:128]".
std::string part_name(const std::string& name, const Box& box, const std::vector<int64_t>& shape) {
  if (box.length == shape) return name;
  std::string text = name + "[";
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (dim > 0) text += ',';
    text += std::to_string(box.offset[dim]);
    text += ':';
    text += std::to_string(box.offset[dim] + box.length[dim]);
  }
  return text + "]";
}

/// Deals the boxes out, each to the rank with least to write of those that may write it.
void deal_out(const std::map<std::string, HeldTensor>& tensors, std::vector<FilePlan>& files) {
  std::vector<uint64_t> load(files.size(), 0);
  std::vector<std::set<std::string>> taken(files.size());
  for (const auto& task : tasks_in_order(tensors)) {
    const auto end = task.may_differ ? task.ranks->begin() + 1 : task.ranks->end();
    const auto rank = *std::min_element(task.ranks->begin(), end, [&](size_t left, size_t right) {
      return load[left] < load[right];
    });
    load[rank] += task.bytes;
    const auto& tensor = tensors.at(*task.name);
    auto name = part_name(*task.name, *task.box, tensor.shape);
    while (!taken[rank].insert(name).second) name += "'";  // a tensor may be called so itself
    files[rank].items.push_back({*task.name, *task.box});
    files[rank].entries.push_back(
        {.name = std::move(name), .dtype = tensor.dtype, .shape = task.box->length});
  }
}

void add_extras(const Json& description, FilePlan& file) {
  for (const auto& item : description["extras"].items()) {
    const auto bytes = item.value().get<int64_t>();
    file.items.push_back({kExtraPrefix + item.key(), {{0}, {bytes}}});
    file.entries.push_back(
        {.name = kExtraPrefix + item.key(), .dtype = c10::ScalarType::Byte, .shape = {bytes}});
  }
}

void lay_out(const std::string& function, FilePlan& file) {
  std::vector<size_t> order(file.items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t left, size_t right) {
    return comes_first(file.entries[left], file.entries[right]);
  });
  FilePlan sorted;
  for (const auto i : order) {
    sorted.items.push_back(std::move(file.items[i]));
    sorted.entries.push_back(std::move(file.entries[i]));
  }
  sorted.header = layout_file(function, sorted.entries);
  file = std::move(sorted);
}

void fill_index(const std::vector<FilePlan>& files, StoredIndex& index) {
  std::map<std::string, size_t> numbers;
  for (size_t i = 0; i < index.tensors.size(); ++i) numbers.emplace(index.tensors[i].name, i);
  for (size_t rank = 0; rank < files.size(); ++rank) {
    const auto& plan = files[rank];
    const auto data = plan.entries.empty() ? 0 : plan.entries.back().end;
    index.files.push_back({.name = rank_file_name(rank, files.size()),
                           .bytes = plan.header.size() + data,
                           .header_bytes = plan.header.size(),
                           .header_checksum = crc32c(plan.header.data(), plan.header.size())});
    auto& extras = index.extras.emplace_back();
    for (size_t i = 0; i < plan.items.size(); ++i) {
      const auto& entry = plan.entries[i];
      StoredPart part{.file = index.files.back().name,
                      .name = entry.name,
                      .position = plan.header.size() + entry.begin,
                      .bytes = entry.end - entry.begin,
                      .offset = plan.items[i].box.offset,
                      .shape = entry.shape,
                      .checksums = {}};
      const auto& name = plan.items[i].tensor;
      if (name.starts_with(kExtraPrefix))
        extras.emplace(name.substr(std::string_view(kExtraPrefix).size()), std::move(part));
      else
        index.tensors[numbers.at(name)].parts.push_back(std::move(part));
    }
  }
}

}  // namespace

std::string describe_holdings(const std::string& function, const Holdings& holdings,
                              const std::map<std::string, std::string>& extra,
                              const std::string& optimizer) {
  auto tensors = Json::array();
  for (const auto& holding : holdings.tensors) {
    auto boxes = Json::array();
    for (const auto& piece : holding.pieces)
      boxes.push_back(Json::array({piece.box.offset, piece.box.length}));
    dtype_code(function, holding.local.scalar_type());  // throws if files have no such dtype
    tensors.push_back({{"name", holding.name},
                       {"dtype", static_cast<int>(holding.local.scalar_type())},
                       {"shape", holding.shape},
                       {"may_differ", holding.may_differ},
                       {"boxes", std::move(boxes)}});
  }
  auto extras = Json::object();
  for (const auto& [name, bytes] : extra) extras[name] = bytes.size();
  return to_text(function, {{"tensors", std::move(tensors)},
                            {"aliases", holdings.aliases},
                            {"extras", std::move(extras)},
                            {"optimizer", optimizer}});
}

SavePlan plan_save(const std::string& function, const std::vector<std::string>& descriptions) {
  SavePlan plan;
  plan.files.resize(descriptions.size());
  std::map<std::string, HeldTensor> tensors;
  std::map<std::string, std::string> aliases;
  for (size_t rank = 0; rank < descriptions.size(); ++rank) {
    const auto description = Json::parse(descriptions[rank]);
    read_description(function, description, rank, tensors);
    for (const auto& item : description["aliases"].items())
      aliases.emplace(item.key(), item.value().get<std::string>());
    add_extras(description, plan.files[rank]);
    const auto optimizer = description["optimizer"].get<std::string>();
    if (rank == 0) plan.index.optimizer = optimizer;
    TORCH_CHECK_VALUE(optimizer == plan.index.optimizer, function,
                      ": expected optimizers of the same parameters with the same options on all "
                      "ranks, got others on rank ",
                      rank, "; make them alike");
  }
  check_complete(function, tensors);
  for (const auto& [name, tensor] : tensors) {
    plan.index.tensors.push_back(
        {.name = name, .alias_of = {}, .dtype = tensor.dtype, .shape = tensor.shape, .parts = {}});
  }
  for (const auto& [name, of] : aliases) {
    if (tensors.count(name) != 0) continue;
    const auto& tensor = tensors.at(of);
    plan.index.tensors.push_back(
        {.name = name, .alias_of = of, .dtype = tensor.dtype, .shape = tensor.shape, .parts = {}});
  }
  deal_out(tensors, plan.files);
  for (auto& file : plan.files) lay_out(function, file);
  fill_index(plan.files, plan.index);
  return plan;
}

}  // namespace tessera::state
