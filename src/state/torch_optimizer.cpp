// Python's optimizer.state_dict(): state by the number of a parameter, and groups of numbers.
#include <tessera/serialize/torch_file.h>

#include "optim/options.h"
#include "state/optimizer_kind.h"
#include "state/optimizer_state_dict.h"
#include "state/torch_files.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <optional>

namespace tessera {
namespace {

using state::PickleValue;
using Kind = PickleValue::Kind;

constexpr const char* kFunction = "import_torch_optimizer";

class PythonOptimizer {
 public:
  PythonOptimizer(const std::string& file, const std::string& key)
      : source_(kFunction, file, state::TorchTensors::Keeps::All),
        dict_(source_.file().at(key)),
        groups_(part("param_groups", Kind::List)),
        states_(part("state", Kind::Dict)) {}

  /// By name, with the options that the optimizer has.
  OptimizerStateDict dict(const std::vector<std::vector<std::string>>& names,
                          const torch::optim::Optimizer& optimizer) {
    require(groups_.items.size() == names.size(), "expected ", names.size(),
            " groups of parameters, as the optimizer has, got ", groups_.items.size(),
            "; make the optimizer with the same groups");
    const auto expected = state::kind_of(optimizer, kFunction);
    OptimizerStateDict dict;
    for (size_t g = 0; g < names.size(); ++g) {
      const auto where = c10::str("group ", g);
      const auto& group = value_at(groups_.items[g]);
      const auto* params = find(group, "params");
      require(params != nullptr && params->kind == Kind::List &&
                  params->items.size() == names[g].size(),
              "expected ", names[g].size(), " parameters in ", where, ", got ",
              params == nullptr ? 0 : params->items.size(),
              "; make the optimizer with the same parameters in the same order");
      for (size_t i = 0; i < names[g].size(); ++i) {
        const auto& number = value_at(params->items[i]);
        require(number.kind == Kind::Int, "expected numbers of parameters in ", where, ", got ",
                kind_name(number));
        read_state(number.integer, names[g][i], dict);
      }
      const auto own = optim::read_options(optimizer.param_groups()[g].options());
      dict.kind = kind(group, own);
      // The loader refuses it by its kind, which says more than an option that is not there.
      if (!dict.kind.empty() && dict.kind != expected->name()) return dict;
      dict.param_groups.push_back({.params = names[g], .options = options(group, own, where)});
    }
    return dict;
  }

 private:
  template <class... Words>
  void require(bool holds, const Words&... words) const {
    source_.file().file().name.require(holds, words...);
  }
  const PickleValue& value_at(uint32_t number) const { return source_.file().pickle()[number]; }

  /// Null if there is none of this name.
  const PickleValue* find(const PickleValue& dict, const std::string& name) const {
    for (size_t i = 0; dict.kind == Kind::Dict && i < dict.items.size(); i += 2) {
      const auto& key = value_at(dict.items[i]);
      if (key.kind == Kind::String && key.text == name) return &value_at(dict.items[i + 1]);
    }
    return nullptr;
  }

  const PickleValue& part(const char* name, Kind kind) const {
    const auto* found = find(dict_, name);
    require(found != nullptr && found->kind == kind, "expected '", name,
            "' of an optimizer's state dict, got ", kind_name(found == nullptr ? dict_ : *found),
            "; give the key of the optimizer, {.key = \"optimizer\"}");
    return *found;
  }

  void read_state(int64_t number, const std::string& parameter, OptimizerStateDict& dict) {
    for (size_t i = 0; i < states_.items.size(); i += 2) {
      const auto& key = value_at(states_.items[i]);
      if (key.kind != Kind::Int || key.integer != number) continue;
      const auto& fields = value_at(states_.items[i + 1]);
      require(fields.kind == Kind::Dict, "expected a dict as state of '", parameter, "', got ",
              kind_name(fields));
      for (size_t f = 0; f < fields.items.size(); f += 2) {
        const auto& name = value_at(fields.items[f]);
        const auto& value = value_at(fields.items[f + 1]);
        require(name.kind == Kind::String, "expected names of the state of '", parameter, "', got ",
                kind_name(name));
        source_.file().check_key(name);
        if (value.kind == Kind::None) continue;  // SGD without momentum
        dict.state[parameter][name.text] =
            tensor(value, c10::str(state::in_quotes(name.text), " of '", parameter, "'"));
      }
    }
  }

  at::Tensor tensor(const PickleValue& value, const std::string& what) {
    if (value.kind == Kind::Int) return at::scalar_tensor(value.integer, at::kLong);
    if (value.kind == Kind::Float) return at::scalar_tensor(value.number, at::kDouble);
    return source_.value(source_.file().tensor(value, what));
  }

  /// Those that the optimizer has. PyTorch saves more of them with every version: how kernels run
  /// stays if it does not say.
  optim::OptionValues options(const PickleValue& group, const optim::OptionValues& own,
                              const std::string& where) const {
    optim::OptionValues options = own;
    for (auto& [name, value] : options) {
      const auto* given = find(group, name);
      require(given != nullptr || name == "maximize" || name == "foreach" || name == "fused" ||
                  name == "decoupled_weight_decay",
              "expected option '", name, "' in ", where,
              ", got none; load it into the same kind of optimizer");
      if (given != nullptr) value = option(*given, value, name, where);
    }
    const auto* maximize = find(group, "maximize");
    require(own.count("maximize") != 0 || maximize == nullptr || maximize->integer == 0,
            "expected ", where,
            " to minimize, as torch::optim's do, got maximize = True; load it "
            "into an optimizer of tessera::optim");
    return options;
  }

  /// As options that no other kind has tell. Empty: not known, or one of Adam and AdamW, which an
  /// option tells apart, where that is not saved or is taken over.
  std::string kind(const PickleValue& group, const optim::OptionValues& own) const {
    const auto has = [&](const char* name) { return find(group, name) != nullptr; };
    if (has("dampening") && has("nesterov")) return "SGD";
    if (has("alpha") && has("centered")) return "RMSprop";
    if (has("ns_coefficients") && has("ns_steps")) return "Muon";
    if (has("beta2_decay") && has("d")) return "Adafactor";
    if (has("lr_decay") && has("initial_accumulator_value")) return "Adagrad";
    if (!has("betas") || !has("amsgrad")) return "";
    const auto* decoupled = find(group, "decoupled_weight_decay");
    if (decoupled != nullptr && own.count("decoupled_weight_decay") == 0)
      return decoupled->integer != 0 ? "AdamW" : "Adam";
    return own.count("amsgrad") != 0 ? "" : "Adam or AdamW";
  }

  /// A number is a double where the optimizer has one.
  c10::IValue option(const PickleValue& given, const c10::IValue& own, const std::string& name,
                     const std::string& where) const {
    switch (given.kind) {
      case Kind::None:
        return {};
      case Kind::Bool:
        return given.integer != 0;
      case Kind::Float:
        return given.number;
      case Kind::String:
        return given.text;
      case Kind::Int:
        return own.isDouble() ? c10::IValue(static_cast<double>(given.integer))
                              : c10::IValue(given.integer);
      case Kind::List:
      case Kind::Tuple: {
        require(own.isTuple() && own.toTupleRef().elements().size() == given.items.size(),
                "expected another value as option '", name, "' of ", where, ", got ",
                kind_name(given));
        std::vector<c10::IValue> elements;
        for (size_t i = 0; i < given.items.size(); ++i)
          elements.push_back(
              option(value_at(given.items[i]), own.toTupleRef().elements()[i], name, where));
        return c10::ivalue::Tuple::create(std::move(elements));
      }
      default:
        source_.file().file().name.refuse("expected a number as option '", name, "' of ", where,
                                          ", got ", kind_name(given));
    }
  }

  state::TorchTensors source_;
  const PickleValue& dict_;
  const PickleValue& groups_;
  const PickleValue& states_;
};

}  // namespace

void import_torch_optimizer(const std::string& file, nn::ModuleRef module,
                            torch::optim::Optimizer& optimizer, ReadTorchOptions options) {
  const c10::AutoGradMode no_grad(false);
  const auto names = state::named_groups(*module, optimizer, kFunction);
  const auto dict = PythonOptimizer(file, options.key).dict(names, optimizer);
  state::OptimizerLoader loader(kFunction, *module, optimizer, dict,
                                state::OptimizerLoader::Covers::All, file);
  loader.check();
  loader.load();
}

}  // namespace tessera
