#include <tessera/serialize/torch_file.h>

#include "state/read_values.h"
#include "state/torch_tensors.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <filesystem>

namespace tessera {
namespace {

using state::PickleValue;
using Kind = PickleValue::Kind;

/// Tensors in nested dicts and lists. Values may be met again and again, so the walk is bounded.
class TorchListing {
 public:
  TorchListing(const state::TorchFile& file, std::vector<CheckpointIndex::Tensor>& tensors)
      : file_(file), tensors_(tensors) {}

  void list(const PickleValue& value, const std::string& name, int depth) {
    constexpr int kMaxDepth = 20;
    constexpr size_t kMaxValues = 1'000'000;
    // A value may be met again and again under ever longer names.
    constexpr size_t kMaxText = 256 << 20;
    text_ += name.size();
    file_.file().name.require(text_ < kMaxText, "expected names of at most ", kMaxText,
                              " bytes in all, got more");
    file_.file().name.require(depth < kMaxDepth && ++values_ < kMaxValues, "expected at most ",
                              kMaxValues, " values, nested ", kMaxDepth, " deep, got more");
    if (file_.is_tensor(value)) {
      tensors_.push_back(
          state::stored_tensor(file_, name, file_.tensor(value, state::in_quotes(name))));
      return;
    }
    const bool is_dict = value.kind == Kind::Dict;
    if (!is_dict && value.kind != Kind::List && value.kind != Kind::Tuple) return;
    for (size_t i = 0; i < value.items.size(); i += is_dict ? 2 : 1) {
      const auto& item = file_.pickle()[value.items[is_dict ? i + 1 : i]];
      if (is_dict) file_.check_key(file_.pickle()[value.items[i]]);
      const auto key = is_dict ? key_text(file_.pickle()[value.items[i]]) : std::to_string(i);
      list(item, name.empty() ? key : name + "/" + key, depth + 1);
    }
  }

 private:
  static std::string key_text(const PickleValue& key) {
    if (key.kind == Kind::String) return key.text;
    return key.kind == Kind::Int ? std::to_string(key.integer) : state::kind_name(key);
  }

  const state::TorchFile& file_;
  std::vector<CheckpointIndex::Tensor>& tensors_;
  size_t values_ = 0;
  size_t text_ = 0;
};

}  // namespace

StateDict read_torch(const std::string& file, ReadTorchOptions options) {
  const c10::AutoGradMode no_grad(false);
  state::TorchTensors source("read_torch", file, state::TorchTensors::Keeps::All);
  StateDict tensors;
  for (const auto& [name, tensor] : source.file().tensors(options.key)) {
    tensors.insert(name, source.value(tensor));
  }
  return tensors;
}

LoadReport import_torch(const std::string& file, nn::ModuleRef module, ImportTorchOptions options) {
  constexpr const char* kFunction = "import_torch";
  state::TorchTensors source(kFunction, file, state::TorchTensors::Keeps::Last);
  source.select(options.key);
  return state::import_values(kFunction, file, *module, source, options.strict);
}

void verify_torch(const std::string& file) {
  state::TorchTensors("verify_torch", file, state::TorchTensors::Keeps::Last).verify();
}

CheckpointIndex read_torch_index(const std::string& file) {
  const state::TorchTensors source("read_torch_index", file, state::TorchTensors::Keeps::Last);
  CheckpointIndex index;
  TorchListing(source.file(), index.tensors).list(source.file().at(""), "", 0);
  index.files.push_back({file, std::filesystem::file_size(file)});
  return index;
}

}  // namespace tessera
