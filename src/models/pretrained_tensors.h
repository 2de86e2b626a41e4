#pragma once

#include <tessera/models/config.h>

#include "state/files/stored_checkpoint.h"

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera::models {

/// Whether files hold this matrix with rows as columns: gpt2's layers.
bool is_transposed_in_files(Family family, const std::string& name);

/// Tensors of a Hugging Face folder by the names, and in the shapes, of a CausalLM. Left out are
/// those that a decoder computes itself (masks, frequencies) and a tied head's second copy; names
/// without "model." or "transformer.", of a model that was saved without its head, get it.
class PretrainedTensors final : public state::TensorSource {
 public:
  PretrainedTensors(std::unique_ptr<state::TensorSource> files, const DecoderConfig& config);

  const state::StoredTensor* find(const std::string& name) const override;
  std::vector<std::string> names() const override;
  void read(const state::StoredTensor& tensor, const state::Box& box, void* to) override;

 private:
  struct Known {
    state::StoredTensor tensor;           // as the model has it
    const state::StoredTensor* in_files;  // as it is stored
    bool is_transposed;
  };

  std::unique_ptr<state::TensorSource> files_;
  std::vector<std::string> names_;
  std::unordered_map<std::string, Known> known_;
};

}  // namespace tessera::models
