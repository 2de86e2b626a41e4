#pragma once

#include <tessera/parallel/styles.h>

#include <initializer_list>
#include <map>
#include <vector>

/// Styles that place what goes into a module and what comes out, and leave its parameters alone.
namespace tessera {

/// Placements of several tensors, in order, or of the only one; none where a tensor is left alone.
class Layouts {
 public:
  Layouts() = default;
  Layouts(Placement only) : each_{only} {}  // NOLINT(google-explicit-constructor)
  Layouts(std::initializer_list<std::optional<Placement>> each) : each_(each) {}

  bool empty() const { return each_.empty(); }
  size_t size() const { return each_.size(); }
  const std::optional<Placement>& operator[](size_t index) const { return each_[index]; }

 private:
  std::vector<std::optional<Placement>> each_;
};
using NamedLayouts = std::map<std::string, std::optional<Placement>>;

struct PrepareModuleInputOptions {
  /// Of the arguments of forward in order, without those named below. Plain tensors are understood
  /// as placed so, and moved to what is desired if that differs.
  Layouts input_layouts = {};
  Layouts desired_input_layouts = {};
  /// Of arguments by name, given by TESSERA_MODULE(Net, "x", "mask").
  NamedLayouts input_kwarg_layouts = {};
  NamedLayouts desired_input_kwarg_layouts = {};
  bool use_local_output = false;  // forward gets this rank's part, as a plain tensor
};

/// Places what goes into a module.
class PrepareModuleInput final : public ParallelStyle {
 public:
  explicit PrepareModuleInput(PrepareModuleInputOptions options);
  void apply(const StyleTarget& target) const override;

 private:
  PrepareModuleInputOptions options_;
};

struct PrepareModuleOutputOptions {
  Layouts output_layouts = {};  // of the tensors in the result, in order
  Layouts desired_output_layouts = {};
  bool use_local_output = true;
};

/// Places what comes out of a module.
class PrepareModuleOutput final : public ParallelStyle {
 public:
  explicit PrepareModuleOutput(PrepareModuleOutputOptions options);
  void apply(const StyleTarget& target) const override;

 private:
  PrepareModuleOutputOptions options_;
};

struct PrepareModuleInputOutputOptions {
  Layouts input_layouts = {};
  Layouts desired_input_layouts = {};
  NamedLayouts input_kwarg_layouts = {};
  NamedLayouts desired_input_kwarg_layouts = {};
  bool use_local_input = false;
  Layouts output_layouts = {};
  Layouts desired_output_layouts = {};
  bool use_local_output = true;
};

/// Both.
class PrepareModuleInputOutput final : public ParallelStyle {
 public:
  explicit PrepareModuleInputOutput(PrepareModuleInputOutputOptions options);
  void apply(const StyleTarget& target) const override;

 private:
  PrepareModuleInput input_;
  PrepareModuleOutput output_;
};

}  // namespace tessera
