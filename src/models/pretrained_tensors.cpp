#include "models/pretrained_tensors.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

namespace tessera::models {
namespace {

constexpr const char* kHead = "lm_head.weight";

bool is_computed(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with("rotary_emb.inv_freq");
}

}  // namespace

bool is_transposed_in_files(Family family, const std::string& name) {
  if (family != Family::GPT2) return false;
  for (const auto* layer : {".c_attn.weight", ".c_proj.weight", ".c_fc.weight"}) {
    if (name.ends_with(layer)) return true;
  }
  return false;
}

PretrainedTensors::PretrainedTensors(std::unique_ptr<state::TensorSource> files,
                                     const DecoderConfig& config)
    : files_(std::move(files)) {
  const std::string prefix = config.family == Family::GPT2 ? "transformer." : "model.";
  const auto stored = files_->names();
  const bool has_prefix = std::ranges::any_of(
      stored, [&](const std::string& name) { return name.starts_with(prefix); });
  for (const auto& name : stored) {
    if (is_computed(name) || (name == kHead && config.tie_word_embeddings)) continue;
    const auto full = has_prefix || name == kHead ? name : prefix + name;
    const auto* in_files = files_->find(name);
    Known known{*in_files, in_files, false};
    known.tensor.name = full;
    known.is_transposed =
        in_files->shape.size() == 2 && is_transposed_in_files(config.family, full);
    if (known.is_transposed) std::swap(known.tensor.shape[0], known.tensor.shape[1]);
    names_.push_back(full);
    known_.emplace(full, std::move(known));
  }
}

const state::StoredTensor* PretrainedTensors::find(const std::string& name) const {
  const auto found = known_.find(name);
  return found == known_.end() ? nullptr : &found->second.tensor;
}

std::vector<std::string> PretrainedTensors::names() const { return names_; }

void PretrainedTensors::read(const state::StoredTensor& tensor, const state::Box& box, void* to) {
  const auto& known = known_.at(tensor.name);
  if (!known.is_transposed) return files_->read(*known.in_files, box, to);
  const state::Box transposed{{box.offset[1], box.offset[0]}, {box.length[1], box.length[0]}};
  const at::TensorOptions options(tensor.dtype);
  auto columns = at::empty(transposed.length, options);
  files_->read(*known.in_files, transposed, columns.data_ptr());
  at::from_blob(to, box.length, options).copy_(columns.t());
}

}  // namespace tessera::models
