// Styles that place inputs and outputs of a module and leave its parameters alone.
#include <tessera/parallel/prepare.h>

#include "base/text.h"
#include "parallel/boundary.h"

#include <c10/util/Exception.h>

namespace tessera {
namespace parallel {
namespace {

/// What one tensor is and what it shall become.
struct Preparation {
  std::optional<Placement> given;  // none: left alone
  std::optional<Placement> desired;
  bool use_local;
};

void prepare(at::Tensor& tensor, const Preparation& preparation, const DeviceMesh& mesh,
             const Speaker& speaker) {
  if (!preparation.given || !tensor.defined()) return;
  const auto& [given, desired, use_local] = preparation;
  auto placed = as_distributed(tensor, mesh, *given, speaker);
  if (desired && !are_equal(*given, *desired, placed.dim()))
    placed = placed_at(placed, *desired, /*async_op=*/!use_local);
  tensor = use_local ? placed.to_local() : at::Tensor(placed);
}

void check_lengths(const char* style, const char* what, size_t given, size_t desired) {
  TORCH_CHECK_VALUE(desired > 0 || given == 0, style, ": expected desired_", what, " beside ", what,
                    ", got none; desired module inputs and outputs should not be left out");
  TORCH_CHECK_VALUE(given == desired, style, ": expected ", what, " and desired_", what,
                    " of the same length, got ", given, " and ", desired);
}

void check_names(const char* style, const NamedLayouts& given, const NamedLayouts& desired) {
  check_lengths(style, "input_kwarg_layouts", given.size(), desired.size());
  for (const auto& [name, placement] : given)
    TORCH_CHECK_VALUE(desired.contains(name), style,
                      ": expected desired_input_kwarg_layouts to name '", name,
                      "', which input_kwarg_layouts names");
}

void prepare_argument(const nn::Value& value, const Preparation& preparation,
                      const DeviceMesh& mesh, const Speaker& speaker, const std::string& which) {
  if (!preparation.given) return;
  size_t tensors = 0;
  value.for_each_tensor([&](at::Tensor&) { ++tensors; });
  // An optional argument that was not passed has nothing to be placed.
  if (tensors == 0 && value.is<std::optional<at::Tensor>>()) return;
  TORCH_CHECK_VALUE(tensors == 1, speaker.style, ": expected argument ", which, " of ",
                    speaker.module,
                    " to be a tensor, as a layout is given for it, got something with ", tensors,
                    " tensors; leave it out with std::nullopt");
  value.for_each_tensor([&](at::Tensor& tensor) { prepare(tensor, preparation, mesh, speaker); });
}

std::vector<std::string> names_in(const nn::Arguments& arguments) {
  std::vector<std::string> names;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (*arguments[i].name() != '\0') names.emplace_back(arguments[i].name());
  }
  return names;
}

void prepare_named(const nn::Arguments& arguments, const PrepareModuleInputOptions& options,
                   const DeviceMesh& mesh, const Speaker& speaker) {
  for (const auto& [name, given] : options.input_kwarg_layouts) {
    const auto* value = arguments.find(name);
    TORCH_CHECK_VALUE(value != nullptr, speaker.style, ": expected forward of ", speaker.module,
                      " to have a parameter '", name, "'; it has ",
                      format_list(names_in(arguments)),
                      "; name them in TESSERA_MODULE(Net, \"x\", …)");
    prepare_argument(
        *value, {given, options.desired_input_kwarg_layouts.at(name), options.use_local_output},
        mesh, speaker, "'" + name + "'");
  }
}

void prepare_positional(const nn::Arguments& arguments, const PrepareModuleInputOptions& options,
                        const DeviceMesh& mesh, const Speaker& speaker) {
  if (options.input_layouts.empty()) return;
  std::vector<size_t> positions;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!options.input_kwarg_layouts.contains(arguments[i].name())) positions.push_back(i);
  }
  TORCH_CHECK_VALUE(positions.size() == options.input_layouts.size(), speaker.style,
                    ": expected a call of ", speaker.module, " with ", options.input_layouts.size(),
                    " arguments, as many as there are input_layouts, got ", positions.size(),
                    "; give one layout per argument, std::nullopt for those to be left alone");
  for (size_t i = 0; i < positions.size(); ++i) {
    prepare_argument(
        arguments[positions[i]],
        {options.input_layouts[i], options.desired_input_layouts[i], options.use_local_output},
        mesh, speaker, std::to_string(positions[i]));
  }
}

void prepare_result(nn::Result& result, const PrepareModuleOutputOptions& options,
                    const DeviceMesh& mesh, const Speaker& speaker) {
  size_t tensors = 0;
  result.for_each_tensor([&](at::Tensor&) { ++tensors; });
  TORCH_CHECK_VALUE(tensors == options.output_layouts.size(), speaker.style, ": expected ",
                    speaker.module, " to return ", options.output_layouts.size(),
                    " tensors, as many as there are output_layouts, got ", tensors,
                    "; give one layout per tensor, std::nullopt for those to be left alone");
  size_t i = 0;
  result.for_each_tensor([&](at::Tensor& tensor) {
    prepare(
        tensor,
        {options.output_layouts[i], options.desired_output_layouts[i], options.use_local_output},
        mesh, speaker);
    ++i;
  });
}

}  // namespace
}  // namespace parallel

PrepareModuleInput::PrepareModuleInput(PrepareModuleInputOptions options)
    : options_(std::move(options)) {
  constexpr const char* kStyle = "PrepareModuleInput";
  parallel::check_lengths(kStyle, "input_layouts", options_.input_layouts.size(),
                          options_.desired_input_layouts.size());
  parallel::check_names(kStyle, options_.input_kwarg_layouts, options_.desired_input_kwarg_layouts);
}

void PrepareModuleInput::apply(const StyleTarget& target) const {
  parallel::require_hookable(target, "PrepareModuleInput");
  const parallel::Speaker speaker{"PrepareModuleInput", parallel::describe(target)};
  register_forward_pre_hook(target.module, [options = options_, speaker, mesh = target.mesh](
                                               torch::nn::Module&, nn::Arguments& arguments) {
    parallel::prepare_positional(arguments, options, mesh, speaker);
    parallel::prepare_named(arguments, options, mesh, speaker);
  });
}

PrepareModuleOutput::PrepareModuleOutput(PrepareModuleOutputOptions options)
    : options_(std::move(options)) {
  constexpr const char* kStyle = "PrepareModuleOutput";
  TORCH_CHECK_VALUE(!options_.output_layouts.empty(), kStyle,
                    ": expected output_layouts and desired_output_layouts, got none");
  parallel::check_lengths(kStyle, "output_layouts", options_.output_layouts.size(),
                          options_.desired_output_layouts.size());
}

void PrepareModuleOutput::apply(const StyleTarget& target) const {
  parallel::require_hookable(target, "PrepareModuleOutput");
  const parallel::Speaker speaker{"PrepareModuleOutput", parallel::describe(target)};
  register_forward_hook(target.module, [options = options_, speaker, mesh = target.mesh](
                                           torch::nn::Module&, nn::Arguments&, nn::Result& result) {
    parallel::prepare_result(result, options, mesh, speaker);
  });
}

PrepareModuleInputOutput::PrepareModuleInputOutput(PrepareModuleInputOutputOptions options)
    : input_({.input_layouts = std::move(options.input_layouts),
              .desired_input_layouts = std::move(options.desired_input_layouts),
              .input_kwarg_layouts = std::move(options.input_kwarg_layouts),
              .desired_input_kwarg_layouts = std::move(options.desired_input_kwarg_layouts),
              .use_local_output = options.use_local_input}),
      output_({.output_layouts = std::move(options.output_layouts),
               .desired_output_layouts = std::move(options.desired_output_layouts),
               .use_local_output = options.use_local_output}) {}

void PrepareModuleInputOutput::apply(const StyleTarget& target) const {
  input_.apply(target);
  output_.apply(target);
}

}  // namespace tessera
