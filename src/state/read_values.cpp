#include "state/read_values.h"

#include "base/text.h"
#include "dtensor/part.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

namespace tessera::state {
namespace {

std::string differing(const std::string& name, const std::string& expected,
                      const std::string& got) {
  return name + " (expected " + expected + ", got " + got + ")";
}

std::string titled(const char* title, const std::vector<std::string>& names) {
  return names.empty() ? "" : c10::str("; ", title, ": ", format_list(names));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  return c10::str(c10::IntArrayRef(shape));
}

}  // namespace

at::Tensor read_part_of(TensorSource& source, const StoredTensor& tensor, const Holding& holding) {
  auto local = at::empty(holding.local.sizes(), at::TensorOptions(tensor.dtype));
  auto* memory = static_cast<uint8_t*>(local.data_ptr());
  const auto row_bytes =
      local.dim() == 0 ? 0 : local.stride(0) * static_cast<int64_t>(local.element_size());
  for (const auto& piece : holding.pieces)
    source.read(tensor, piece.box, memory + piece.row * row_bytes);
  if (!dtensor::has_part(holding.tensor)) return local;
  return dtensor::wrap(local.to(holding.local.device()), dtensor::part_of(holding.tensor).spec,
                       holding.tensor.sizes(), holding.tensor.strides());
}

at::Tensor read_whole(TensorSource& source, const StoredTensor& tensor) {
  auto whole = at::empty(tensor.shape, at::TensorOptions(tensor.dtype));
  const Box all{std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape};
  if (whole.numel() > 0) source.read(tensor, all, whole.data_ptr());
  return whole;
}

std::string Differences::to_string() const {
  std::vector<std::string> other_shape;
  for (const auto& mismatch : report.mismatched) {
    other_shape.push_back(
        differing(mismatch.name, shape_text(mismatch.expected), shape_text(mismatch.got)));
  }
  return titled("missing", report.missing) + titled("unexpected", report.unexpected) +
         titled("of another shape", other_shape) + titled("of another dtype", other_dtype);
}

ModuleValues::ModuleValues(const std::string& function, const torch::nn::Module& module,
                           const TensorSource& source, bool converts)
    : holdings_(hold_module(function, module)) {
  std::set<std::string> known;
  std::map<std::string, const Holding*> by_name;
  for (const auto& holding : holdings_.tensors) {
    known.insert(holding.name);
    by_name.emplace(holding.name, &holding);
    compare(holding, holding.name, source, converts);
  }
  for (const auto& [name, of] : holdings_.aliases) {
    known.insert(name);
    const auto* stored = source.find(name);
    // The same tensor there, too: its value comes under the other name.
    if (stored != nullptr && (stored->alias_of == of || stored->name == of)) continue;
    compare(*by_name.at(of), name, source, converts);
  }
  for (const auto& name : source.names()) {
    if (known.count(name) == 0 && !name.starts_with(kOptimizerPrefix))
      differences_.report.unexpected.push_back(name);
  }
}

void ModuleValues::compare(const Holding& holding, const std::string& name,
                           const TensorSource& source, bool converts) {
  const auto* stored = source.find(name);
  if (stored == nullptr) {
    differences_.report.missing.push_back(name);
    return;
  }
  const auto dtype = holding.local.scalar_type();
  if (stored->shape != holding.shape) {
    differences_.report.mismatched.push_back({name, holding.shape, stored->shape});
  } else if (stored->dtype != dtype && !converts) {
    differences_.other_dtype.push_back(
        differing(name, c10::toString(dtype), c10::toString(stored->dtype)));
  } else {
    fitting_.emplace_back(&holding, stored);
  }
}

bool ModuleValues::fits(const std::string& name) const {
  return std::any_of(fitting_.begin(), fitting_.end(),
                     [&](const auto& pair) { return pair.first->name == name; });
}

void ModuleValues::read(TensorSource& source) {
  for (const auto& [holding, stored] : fitting_)
    values_.push_back(read_part_of(source, *stored, *holding));
}

void ModuleValues::apply() const {
  const c10::AutoGradMode no_grad(false);
  // The very tensors, not aliases: writes to them may have to wait for other ranks.
  for (size_t i = 0; i < values_.size(); ++i) fitting_[i].first->tensor.copy_(values_[i]);
}

LoadReport import_values(const std::string& function, const std::string& file,
                         torch::nn::Module& module, TensorSource& source, bool strict) {
  const c10::AutoGradMode no_grad(false);
  ModuleValues values(function, module, source, /*converts=*/true);
  TORCH_CHECK_VALUE(!strict || values.differences().empty(), function, ": ", file,
                    ": expected the names and shapes of ", module.name(),
                    values.differences().to_string(),
                    "; nothing was loaded; correct the file, or load what fits with {.strict = "
                    "false}");
  values.read(source);
  values.apply();
  return values.differences().report;
}

}  // namespace tessera::state
