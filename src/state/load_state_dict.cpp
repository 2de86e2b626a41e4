#include <tessera/state_dict.h>

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <sstream>

namespace tessera {
namespace {

LoadReport compare(const StateDict& own, const StateDict& dict) {
  LoadReport report;
  for (const auto& [name, tensor] : own) {
    const auto* given = dict.find(name);
    if (given == nullptr || !given->defined()) {
      report.missing.push_back(name);
    } else if (given->sizes() != tensor.sizes()) {
      report.mismatched.push_back({name, tensor.sizes().vec(), given->sizes().vec()});
    }
  }
  for (const auto& [name, tensor] : dict) {
    if (!own.contains(name)) report.unexpected.push_back(name);
  }
  return report;
}

std::string list(const char* title, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  std::string text = std::string("; ") + title + ": ";
  for (size_t i = 0; i < names.size(); ++i) text += (i ? ", " : "") + names[i];
  return text;
}

std::string describe(const LoadReport& report) {
  std::vector<std::string> shapes;
  for (const auto& mismatch : report.mismatched) {
    std::ostringstream text;
    text << mismatch.name << " (expected " << c10::IntArrayRef(mismatch.expected) << ", got "
         << c10::IntArrayRef(mismatch.got) << ")";
    shapes.push_back(text.str());
  }
  return list("missing", report.missing) + list("unexpected", report.unexpected) +
         list("of another shape", shapes);
}

}  // namespace

LoadReport load_state_dict(nn::ModuleRef module, const StateDict& dict, LoadOptions options) {
  const auto own = state_dict(module);
  auto report = compare(own, dict);
  TORCH_CHECK(!options.strict || report.empty(),
              "load_state_dict: expected the names and shapes of ", module->name(),
              describe(report),
              "; nothing was loaded; correct the dict, or load what fits with {.strict = false}");
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, tensor] : own) {
    const auto* given = dict.find(name);
    if (given && given->defined() && given->sizes() == tensor.sizes()) tensor.copy_(*given);
  }
  return report;
}

}  // namespace tessera
