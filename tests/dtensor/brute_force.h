#pragma once

#include "dtensor/input_placements.h"
#include "support/device_cases.h"

#include <functional>
#include <set>
#include <string>
#include <vector>

/// Proves sharding rules: a case is an operator call on whole tensors; it is tried with its inputs
/// placed in every way on meshes of several shapes and must give what one device gives, forward and
/// backward.
namespace tessera::brute_force {

using Tensors = std::vector<at::Tensor>;

/// How an input's values are drawn.
struct Input {
  enum class Kind { Normal, Positive, Unit, Index, Bool, Distinct };

  std::vector<int64_t> sizes;
  Kind kind = Kind::Normal;
  int64_t bound = 0;  // of Index: values are in [0, bound)

  Input(std::initializer_list<int64_t> sizes) : sizes(sizes) {}
  Input(std::vector<int64_t> sizes, Kind kind, int64_t bound = 0)
      : sizes(std::move(sizes)), kind(kind), bound(bound) {}
};
inline Input positive(std::vector<int64_t> sizes) {
  return {std::move(sizes), Input::Kind::Positive};
}
/// In (0, 1).
inline Input unit(std::vector<int64_t> sizes) { return {std::move(sizes), Input::Kind::Unit}; }
inline Input index(std::vector<int64_t> sizes, int64_t bound) {
  return {std::move(sizes), Input::Kind::Index, bound};
}
inline Input boolean(std::vector<int64_t> sizes) { return {std::move(sizes), Input::Kind::Bool}; }
/// No two elements are close: for sorts, maxima and ranks.
inline Input distinct(std::vector<int64_t> sizes) {
  return {std::move(sizes), Input::Kind::Distinct};
}

struct Case {
  std::string name;
  std::vector<Input> inputs;
  std::function<Tensors(const Tensors& inputs)> call;
  bool backward = true;  // differentiate as well
  double tolerance = 2e-4;
};
inline Case forward_only(Case test) {
  test.backward = false;
  return test;
}

/// Calls with one result, of the only input or of all.
using OfOne = std::function<at::Tensor(const at::Tensor&)>;
using OfSeveral = std::function<at::Tensor(const Tensors&)>;

template <class Pair>
Tensors both(Pair pair) {
  return {std::get<0>(pair), std::get<1>(pair)};
}

/// The first result of an operator called by its name ("aten::add.Tensor"), for those that not
/// every libtorch declares; undefined if this one has none of that name.
at::Tensor call_by_name(const std::string& name, std::vector<c10::IValue> arguments);
/// Whether this libtorch has the operator: newer ones have more.
bool has_operator(const std::string& name);

/// Adds cases to a family, at namespace scope.
class Cases {
 public:
  Cases(const std::string& family, std::vector<Case> cases);
};

struct Report {
  int64_t calls = 0;
  std::set<std::string> operators;     // that ran by a rule
  std::set<std::string> kept_sharded;  // of these, with something sharded or partial
  std::set<std::string> without_rule;
};

std::vector<std::string> families();
/// Tries a family on a mesh of this shape, with ranks as threads; failures are gtest's. `share`:
/// the part of the range's placements that is drawn, by the test's seed.
Report try_family(const std::string& family, const std::vector<int64_t>& mesh_shape, Range range,
                  double share);
/// The same on a device, with ranks as processes in a row. Cases that one device can't run there,
/// for tensors of their own on the CPU, are left out.
void try_family_on(const testing::DeviceCase& where, const std::string& family, Range range,
                   double share);

}  // namespace tessera::brute_force
