#include "inspect/checkpoints.h"

#include <tessera/serialize.h>

#include "base/text.h"

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>

namespace tessera::inspect {
namespace {

namespace fs = std::filesystem;

constexpr const char* kIndex = "index.json";
constexpr const char* kCheckpoints = "checkpoints";

ListedCheckpoint describe(const fs::path& path) {
  ListedCheckpoint checkpoint{.name = path.filename().string(), .bytes = 0, .problem = {}};
  try {
    for (const auto& file : read_checkpoint_index(path.string()).files)
      checkpoint.bytes += file.bytes;
  } catch (const c10::Error& error) {
    checkpoint.problem = error.what_without_backtrace();
  }
  return checkpoint;
}

/// Names that end with numbers, in the order of these.
bool is_before(const fs::path& left, const fs::path& right) {
  const auto key = [](const fs::path& path) {
    const auto name = path.filename().string();
    const auto last = name.find_last_not_of("0123456789");
    const auto digits = last == std::string::npos ? name : name.substr(last + 1);
    return std::pair(digits.size(), name);
  };
  return key(left) < key(right);
}

/// Of a folder, in order; those that are damaged, too.
std::vector<fs::path> checkpoints_in(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (fs::exists(entry.path() / kIndex, ignored) &&
        !entry.path().filename().string().starts_with('.'))
      found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end(), is_before);
  return found;
}

/// The checkpoints in `folder`, which `path` names.
Subject list_subject(Subject::Kind kind, const fs::path& path, const fs::path& folder) {
  Subject subject{.kind = kind, .path = path, .index = {}, .checkpoints = {}};
  for (const auto& one : checkpoints_in(folder)) subject.checkpoints.push_back(describe(one));
  if (const auto latest = latest_checkpoint(folder.string())) {
    subject.path = *latest;
    subject.index = read_checkpoint_index(*latest);
  }
  return subject;
}

/// torch.save's files are zip files, or were something else that read_torch_index names.
bool is_torch_file(const fs::path& path) {
  const auto extension = path.extension();
  if (extension == ".pt" || extension == ".pth") return true;
  char first[2] = {};
  std::ifstream(path, std::ios::binary).read(first, sizeof(first));
  return first[0] == 'P' && first[1] == 'K';
}

}  // namespace

Subject find_subject(const fs::path& path) {
  std::error_code ignored;
  TORCH_CHECK_VALUE(
      fs::exists(path, ignored),
      "expected a safetensors file, a file of torch.save, a checkpoint or a run, got ",
      path.string(), ", which does not exist; correct the path");
  if (fs::is_regular_file(path, ignored)) {
    return {.kind = Subject::Kind::File,
            .path = path,
            .index = is_torch_file(path) ? read_torch_index(path.string())
                                         : read_safetensors_index(path.string()),
            .checkpoints = {}};
  }
  const bool has_index = fs::exists(path / kIndex, ignored);
  if (!has_index && fs::is_directory(path / kCheckpoints, ignored))
    return list_subject(Subject::Kind::Run, path, path / kCheckpoints);
  if (!has_index && !checkpoints_in(path).empty())
    return list_subject(Subject::Kind::Folder, path, path);
  return {.kind = Subject::Kind::Checkpoint,
          .path = path,
          .index = read_checkpoint_index(path.string()),
          .checkpoints = {}};
}

void verify_subject(const Subject& subject) {
  if (!subject.index) return;
  if (subject.kind == Subject::Kind::File && is_torch_file(subject.path))
    verify_torch(subject.path.string());
  else if (subject.kind == Subject::Kind::File)
    read_safetensors(subject.path.string());
  else
    verify_checkpoint(subject.path.string());
}

namespace {

using Json = nlohmann::ordered_json;
using Row = std::vector<std::string>;

std::string bytes_text(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto amount = static_cast<double>(bytes);
  size_t unit = 0;
  for (; amount >= 1024 && unit + 1 < std::size(kUnits); ++unit) amount /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", amount, kUnits[unit]);
  return text;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t dim = 0; dim < shape.size(); ++dim)
    text += (dim == 0 ? "" : ", ") + std::to_string(shape[dim]);
  return text + "]";
}

/// As Python would cut it out of the whole.
std::string slice_text(const CheckpointIndex::Part& part) {
  std::string text = "[";
  for (size_t dim = 0; dim < part.shape.size(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(part.offset[dim]) + ":" +
            std::to_string(part.offset[dim] + part.shape[dim]);
  }
  return text + "]";
}

std::string checksum_text(const CheckpointIndex::Part& part) {
  if (part.checksums.empty()) return "";
  char text[64];
  if (part.checksums.size() == 1)
    std::snprintf(text, sizeof(text), "%08x", part.checksums[0]);
  else
    std::snprintf(text, sizeof(text), "%08x, %zu more", part.checksums[0],
                  part.checksums.size() - 1);
  return text;
}

std::map<std::string, size_t> ranks_by_file(const CheckpointIndex& index) {
  std::map<std::string, size_t> ranks;
  for (const auto& file : index.files) ranks.emplace(file.name, ranks.size());
  return ranks;
}

/// Columns as wide as their widest entry; the last one is not padded. Entries are made printable:
/// names come from files.
std::string aligned(std::vector<Row> rows) {
  std::vector<size_t> widths;
  for (auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = printable(row[i]);
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line += std::string(widths[i] - row[i].size() + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

void add_tensor(const CheckpointIndex::Tensor& tensor, const std::map<std::string, size_t>& ranks,
                std::vector<Row>& rows) {
  Row row = {tensor.name, c10::toString(tensor.dtype), shape_text(tensor.shape)};
  if (!tensor.alias_of.empty()) {
    row.push_back("-");
    row.push_back("the same as " + tensor.alias_of);
    rows.push_back(std::move(row));
    return;
  }
  row.push_back(bytes_text(tensor.bytes()));
  for (const auto& part : tensor.parts) {
    if (ranks.size() > 1 || tensor.parts.size() > 1) {
      const bool is_whole = part.shape == tensor.shape;
      row.push_back("rank " + std::to_string(ranks.at(part.file)) +
                    (is_whole ? "" : " " + slice_text(part)));
    } else {
      row.emplace_back("");
    }
    row.push_back(checksum_text(part));
    rows.push_back(std::move(row));
    row = {"", "", "", ""};
  }
  if (tensor.parts.empty()) rows.push_back(std::move(row));
}

std::string index_table(const Subject& subject) {
  const auto& index = *subject.index;
  const bool is_file = subject.kind == Subject::Kind::File;
  const auto ranks =
      is_file ? std::map<std::string, size_t>{{subject.path.string(), 0}} : ranks_by_file(index);
  std::vector<Row> rows = {
      {"tensor", "dtype", "shape", "size", is_file ? "" : "held by", is_file ? "" : "CRC-32C"}};
  for (const auto& tensor : index.tensors) add_tensor(tensor, ranks, rows);
  auto text = aligned(rows) + "\n" + std::to_string(index.tensors.size()) + " tensors, " +
              bytes_text(index.bytes());
  if (is_file) return text + "\n";
  text += ", saved by " + std::to_string(index.world_size) +
          (index.world_size == 1 ? " rank, " : " ranks, ") +
          (index.has_optimizer ? "with an optimizer\n\n" : "without an optimizer\n\n");
  rows = {{"file", "size", "extras"}};
  for (size_t rank = 0; rank < index.files.size(); ++rank) {
    std::string extras;
    for (const auto& [name, bytes] : index.extras[rank])
      extras += (extras.empty() ? "" : ", ") + name + " (" + bytes_text(bytes) + ")";
    rows.push_back({index.files[rank].name, bytes_text(index.files[rank].bytes), extras});
  }
  return text + aligned(rows);
}

Json index_json(const CheckpointIndex& index) {
  auto json = Json::object();
  json["world_size"] = index.world_size;
  json["has_optimizer"] = index.has_optimizer;
  json["bytes"] = index.bytes();
  json["tensors"] = Json::array();
  for (const auto& tensor : index.tensors) {
    auto parts = Json::array();
    for (const auto& part : tensor.parts) {
      parts.push_back({{"file", part.file},
                       {"position", part.position},
                       {"bytes", part.bytes},
                       {"offset", part.offset},
                       {"shape", part.shape},
                       {"checksums", part.checksums}});
    }
    json["tensors"].push_back({{"name", tensor.name},
                               {"dtype", c10::toString(tensor.dtype)},
                               {"shape", tensor.shape},
                               {"bytes", tensor.bytes()},
                               {"alias_of", tensor.alias_of},
                               {"parts", std::move(parts)}});
  }
  json["files"] = Json::array();
  for (const auto& file : index.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  json["extras"] = index.extras;
  return json;
}

}  // namespace

std::string to_table(const Subject& subject) {
  std::string text;
  if (subject.has_list()) {
    std::vector<Row> rows = {{"checkpoint", "size", ""}};
    for (const auto& one : subject.checkpoints)
      rows.push_back({one.name, one.problem.empty() ? bytes_text(one.bytes) : "-", one.problem});
    text = aligned(rows) + "\n";
    if (!subject.index) return text + "no whole checkpoint\n";
    text += printable(subject.path.string()) + "\n\n";
  }
  return text + index_table(subject);
}

std::string to_json(const Subject& subject) {
  constexpr const char* kKinds[] = {"file", "checkpoint", "run", "folder"};
  auto json = Json::object();
  json["kind"] = kKinds[static_cast<size_t>(subject.kind)];
  json["path"] = subject.path.string();
  if (subject.has_list()) {
    json["checkpoints"] = Json::array();
    for (const auto& one : subject.checkpoints) {
      json["checkpoints"].push_back(
          {{"name", one.name}, {"bytes", one.bytes}, {"problem", one.problem}});
    }
  }
  json["index"] = subject.index ? index_json(*subject.index) : Json();
  return json.dump(2, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) + "\n";
}

}  // namespace tessera::inspect
