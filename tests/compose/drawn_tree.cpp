#include "compose/drawn_tree.h"

#include <c10/util/StringUtil.h>

namespace tessera::testing {
namespace {

struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(int64_t width) : TiedImpl(torch::randn({width, width}) / width) {}
  explicit TiedImpl(const at::Tensor& weight)
      : first(register_module("first", Affine(weight))),
        second(register_module("second", Affine(weight))) {}
  at::Tensor forward(const at::Tensor& x) { return second(first(x).tanh()); }
  Affine first, second;
};
TESSERA_MODULE(Tied);

struct BranchImpl : torch::nn::Module {
  BranchImpl(const Shape& shape, int64_t width, std::vector<Part> given)
      : parts(std::move(given)), list(register_module("list", nn::ModuleList())) {
    for (size_t i = 0; i < parts.size(); ++i) {
      list->push_back(parts[i].module);
      runs_twice.push_back(shape.parts[i].runs_twice);
    }
    if (shape.has_gain) gain = register_parameter("gain", torch::tensor(0.7));
    if (shape.has_bare) bare = register_parameter("bare", torch::randn({width, width}) / width);
    if (shape.has_unused) unused = register_parameter("unused", torch::randn({width, 2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = bare.defined() ? at::mm(x, bare) : x;
    for (size_t i = 0; i < parts.size(); ++i) {
      y = y + parts[i].call(y).tanh();
      if (runs_twice[i]) y = y + parts[i].call(y).tanh();
    }
    return gain.defined() ? y * gain : y;
  }
  std::vector<Part> parts;
  std::vector<bool> runs_twice;
  nn::ModuleList list;
  at::Tensor gain, bare, unused;
};
TESSERA_MODULE(Branch);

struct RootImpl : torch::nn::Module {
  RootImpl(int64_t width, Part given)
      : first(register_module("first", nn::Linear(kTreeInput, width))),
        body(std::move(given)),
        last(register_module("last", nn::Linear(width, 3))),
        scale(register_parameter("scale", torch::tensor(1.5))) {
    register_module("body", body.module);
  }
  at::Tensor forward(const at::Tensor& x) { return last(body.call(first(x))) * scale; }
  nn::Linear first;
  Part body;
  nn::Linear last;
  at::Tensor scale;
};
TESSERA_MODULE(Root);

template <class Holder>
Part part_of(const Holder& holder, std::vector<Part> parts = {}) {
  return {.module = holder.ptr(),
          .call = [holder = holder](const at::Tensor& x) mutable { return holder->forward(x); },
          .push_to = [holder](nn::Sequential& sequence) { sequence->push_back(holder); },
          .parts = std::move(parts)};
}

Part sequence_of(std::vector<Part> parts) {
  nn::Sequential sequence;
  for (const auto& part : parts) {
    part.push_to(sequence);
    sequence->push_back(nn::Tanh());
  }
  return {.module = sequence.ptr(),
          .call = [sequence](const at::Tensor& x) mutable { return sequence->forward(x); },
          .push_to = {},
          .parts = std::move(parts)};
}

Part build_part(const Shape& shape, int64_t width) {
  std::vector<Part> parts;
  for (const auto& inner : shape.parts) parts.push_back(build_part(inner, width));
  switch (shape.kind) {
    case Kind::Layer:
      return part_of(nn::Linear(width, width));
    case Kind::Mlp:
      return part_of(Mlp(shape, width));
    case Kind::Tied:
      return part_of(Tied(width));
    case Kind::Sequence:
      return sequence_of(std::move(parts));
    case Kind::Branch:
      return part_of(Branch(shape, width, parts), parts);
    case Kind::Root:
      return part_of(Root(width, parts[0]), parts);
  }
  TORCH_INTERNAL_ASSERT(false);
}

void freeze(const Shape& shape, const Part& part) {
  if (shape.is_frozen) {
    for (auto& parameter : part.module->parameters()) parameter.requires_grad_(false);
  }
  for (size_t i = 0; i < shape.parts.size(); ++i) freeze(shape.parts[i], part.parts[i]);
}

Kind draw_kind(Random& random, int64_t depth, bool in_sequence) {
  if (depth > 0 && one_in(random, 2))
    return in_sequence || !one_in(random, 3) ? Kind::Branch : Kind::Sequence;
  const Kind leaves[] = {Kind::Layer, Kind::Mlp, Kind::Mlp, Kind::Tied};
  return leaves[draw(random, 0, 3)];
}

Shape draw_shape(Random& random, int64_t depth, Kind kind) {
  Shape shape{.kind = kind,
              .hidden = draw(random, 1, 11),
              .has_gain = one_in(random, 3),
              .has_bare = one_in(random, 3),
              .has_unused = one_in(random, 5),
              .parts = {}};
  const bool has_parts = kind == Kind::Branch || kind == Kind::Sequence;
  if (!has_parts) {
    shape.is_frozen = one_in(random, 5);
    return shape;
  }
  const bool is_sequence = kind == Kind::Sequence;
  for (int64_t n = draw(random, 1, 3); n > 0; --n) {
    const auto inner = draw_kind(random, depth - 1, is_sequence);
    shape.parts.push_back(draw_shape(random, depth - 1, inner));
    shape.parts.back().runs_twice = !is_sequence && one_in(random, 6);
  }
  return shape;
}

}  // namespace

int64_t draw(Random& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

bool one_in(Random& random, int64_t n) { return draw(random, 1, n) == 1; }

MlpImpl::MlpImpl(const Shape& shape, int64_t width)
    : up(register_module("up", nn::Linear(width, shape.hidden))),
      down(register_module("down", nn::Linear(shape.hidden, width))) {
  if (shape.has_gain) gain = register_parameter("gain", torch::tensor(0.5));
  if (shape.has_bare) shift = register_parameter("shift", torch::randn({width}));
  if (shape.has_unused) unused = register_parameter("unused", torch::randn({3}));
}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  auto y = down(up(shift.defined() ? x + shift : x).tanh());
  return gain.defined() ? y * gain : y;
}

TreeShape draw_tree(Random& random) {
  const int64_t width = draw(random, 2, 9);
  const int64_t depth = draw(random, 1, 3);
  const auto body = one_in(random, 5) ? Kind::Sequence : Kind::Branch;
  return {width, Shape{.kind = Kind::Root, .parts = {draw_shape(random, depth, body)}}};
}

std::string describe(const Shape& shape) {
  const char* kNames[] = {"layer", "mlp", "tied", "sequence", "branch", "root"};
  std::string text = kNames[static_cast<int>(shape.kind)];
  if (shape.kind == Kind::Mlp) text += c10::str(" ", shape.hidden);
  const bool has_own = shape.kind == Kind::Mlp || shape.kind == Kind::Branch;
  if (has_own && shape.has_gain) text += " with gain";
  if (has_own && shape.has_bare) text += " with bare parameter";
  if (has_own && shape.has_unused) text += " with unused parameter";
  if (shape.is_frozen) text += " frozen";
  if (shape.runs_twice) text += " twice";
  return text;
}

Part build(const TreeShape& tree) {
  auto root = build_part(tree.root, tree.width);
  root.module->to(torch::kDouble);
  freeze(tree.root, root);
  return root;
}

}  // namespace tessera::testing
