#include "compiler/ir/operators.h"
#include "compiler/ir/rewrite.h"
#include "compiler/ir/text.h"
#include "compiler/passes/recompute.h"
#include "pass_cases.h"
#include "support/random.h"

#include <ATen/ATen.h>

#include <random>

namespace tessera::testing {
namespace {

using compiler::make_node;

/// Draws programs of views, copies, arithmetic, updates in place and collectives. Every node is run
/// when it is drawn, so that its results have the types they have.
class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed), evaluator_(graph_) {}

  Graph program(int nodes) {
    constexpr int kInputs = 3;
    for (int i = 0; i < kInputs; ++i) {
      const auto tensor = at::randn({4, 4});
      const ValueId value = add_value(tensor);
      const auto kind = i == 0 ? InputKind::Argument : InputKind::Parameter;
      graph_.inputs.push_back({value, kind, "input " + std::to_string(i)});
      evaluator_.set(value, tensor);
      alive_.push_back(value);
    }
    for (int i = 0; i < nodes; ++i) add_node();
    add_outputs();
    return graph_;
  }

 private:
  size_t below(size_t limit) { return random_() % limit; }

  ValueId add_value(const at::Tensor& tensor) {
    return graph_.add_value({.dtype = tensor.scalar_type(),
                             .sizes = tensor.sizes().vec(),
                             .strides = tensor.strides().vec()});
  }

  ValueId pick() { return alive_[below(alive_.size())]; }

  ValueType placeholder() const { return {.sizes = {}, .strides = {}}; }

  /// Adds the node, runs it and gives its results their types.
  std::vector<ValueId> add(const std::string& op, std::vector<Argument> arguments, size_t count,
                           bool list = false) {
    std::vector<ValueId> results;
    for (size_t i = 0; i < count; ++i) results.push_back(graph_.add_value(placeholder()));
    std::vector<Argument> declared;
    if (list) declared.push_back(Argument::of(results));
    if (!list) {
      for (const ValueId each : results) declared.push_back(Argument::of(each));
    }
    Node node = make_node(op, std::move(arguments), std::move(declared));
    for (size_t i = 0; i < node.arguments.size(); ++i) {
      if (!compiler::writes(node, i)) continue;
      for (const ValueId value : node.arguments[i].values) kill(value);
    }
    evaluator_.run(node);
    for (const ValueId each : results) {
      const at::Tensor tensor = evaluator_.at(each);
      graph_.type(each) = {.dtype = tensor.scalar_type(),
                           .sizes = tensor.sizes().vec(),
                           .strides = tensor.strides().vec()};
      alive_.push_back(each);
    }
    graph_.nodes.push_back(std::move(node));
    return results;
  }

  /// Nothing in the memory of a consumed value may be used again.
  void kill(ValueId value) {
    const auto storage = evaluator_.at(value).storage().unsafeGetStorageImpl();
    std::erase_if(alive_, [&](ValueId other) {
      return evaluator_.at(other).storage().unsafeGetStorageImpl() == storage;
    });
  }

  void hide(ValueId value) { std::erase(alive_, value); }

  Argument number(double value) { return Argument::of(c10::IValue(value)); }

  void add_pointwise(ValueId x) {
    const char* unary[] = {"aten::neg", "aten::relu", "aten::sin", "aten::clone", "aten::detach"};
    const char* binary[] = {"aten::add.Tensor", "aten::sub.Tensor", "aten::mul.Tensor"};
    switch (below(4)) {
      case 0:
        add(unary[below(5)], {Argument::of(x)}, 1);
        break;
      case 1: {
        const ValueId y = pick();
        if (evaluator_.at(x).sizes() != evaluator_.at(y).sizes()) return;
        add(binary[below(3)], {Argument::of(x), Argument::of(y)}, 1);
        break;
      }
      case 2: {
        const double numbers[] = {0, 1, -0.0, 0.5};
        const char* scalar[] = {"aten::add.Scalar", "aten::sub.Scalar", "aten::mul.Scalar"};
        add(scalar[below(3)], {Argument::of(x), number(numbers[below(4)])}, 1);
        break;
      }
      default:
        add("aten::_foreach_mul.Scalar", {Argument::of(std::vector{x}), number(0.5)}, 1, true);
    }
  }

  void add_view(ValueId x) {
    const at::Tensor tensor = evaluator_.at(x);
    switch (below(4)) {
      case 0:
        if (tensor.dim() == 2) add("aten::t", {Argument::of(x)}, 1);
        break;
      case 1:
        if (tensor.is_contiguous())
          add("aten::view", {Argument::of(x), Argument::of(c10::IValue(tensor.sizes().vec()))}, 1);
        break;
      case 2:
        if (tensor.size(0) == 4)
          add("aten::split.Tensor", {Argument::of(x), Argument::of(c10::IValue(2))}, 2, true);
        break;
      default:
        // Of others it is a copy, which the operator's schema does not tell from a view.
        if (tensor.is_contiguous())
          add("aten::reshape",
              {Argument::of(x), Argument::of(c10::IValue(std::vector<int64_t>{-1}))}, 1);
    }
  }

  /// Of a clone, so that no input is consumed which nothing is written to.
  void add_update(ValueId x) {
    if (below(2) == 0 || is_input_memory(x)) x = add("aten::clone", {Argument::of(x)}, 1)[0];
    if (below(2) == 0) {
      add("aten::mul_.Scalar", {Argument::of(x), number(0.5)}, 1);
    } else {
      const ValueId y = pick();
      if (evaluator_.at(x).sizes() != evaluator_.at(y).sizes() || shares(x, y)) return;
      add("aten::add_.Tensor", {Argument::of(x), Argument::of(y)}, 1);
    }
  }

  bool shares(ValueId left, ValueId right) const {
    return evaluator_.at(left).storage().unsafeGetStorageImpl() ==
           evaluator_.at(right).storage().unsafeGetStorageImpl();
  }

  bool is_input_memory(ValueId value) const {
    return std::any_of(graph_.inputs.begin(), graph_.inputs.end(),
                       [&](const GraphInput& input) { return shares(input.value, value); });
  }

  void add_collective(ValueId x) {
    const Argument sum = Argument::of(c10::IValue("sum")), group = Argument::of(c10::IValue("0"));
    const Argument two = Argument::of(c10::IValue(2));
    if (!evaluator_.at(x).is_contiguous()) return;
    ValueId pending = kNoValue;
    switch (below(4)) {
      case 0:
        pending = add("_c10d_functional::all_reduce", {Argument::of(x), sum, group}, 1)[0];
        break;
      case 1: {
        const ValueId divided = add("aten::div.Scalar", {Argument::of(x), two}, 1)[0];
        pending = add("_c10d_functional::all_reduce", {Argument::of(divided), sum, group}, 1)[0];
        if (below(4) != 0) hide(divided);
        break;
      }
      case 2:
        if (evaluator_.at(x).numel() > 64) return;
        pending =
            add("_c10d_functional::all_gather_into_tensor", {Argument::of(x), two, group}, 1)[0];
        break;
      default:
        if (evaluator_.at(x).size(0) % 2 != 0) return;
        pending = add("_c10d_functional::reduce_scatter_tensor", {Argument::of(x), sum, two, group},
                      1)[0];
    }
    hide(pending);
    add("_c10d_functional::wait_tensor", {Argument::of(pending)}, 1);
  }

  void add_node() {
    const ValueId x = pick();
    switch (below(8)) {
      case 0:
      case 1:
        return add_view(x);
      case 2:
        return add_update(x);
      case 3:
      case 4:
        return add_collective(x);
      default:
        return add_pointwise(x);
    }
  }

  void add_outputs() {
    for (int i = 0; i < 3; ++i) graph_.outputs.push_back({pick(), OutputKind::Result, kNoValue});
    for (const GraphInput& input : graph_.inputs) {
      if (input.kind != InputKind::Parameter) continue;
      const auto fits = [&](ValueId value) {
        const bool other_input = value != input.value && is_input_memory(value);
        return !other_input && evaluator_.at(value).sizes() == evaluator_.at(input.value).sizes();
      };
      for (size_t i = alive_.size(); i-- > 0;) {
        // An update that the program made of the input, most of the time the last one.
        if (!fits(alive_[i]) || alive_[i] == input.value || shares(alive_[i], input.value))
          continue;
        if (below(3) == 0) continue;
        graph_.outputs.push_back({alive_[i], OutputKind::Write, input.value});
        break;
      }
    }
  }

  std::mt19937_64 random_;
  Graph graph_;
  Evaluator evaluator_;
  std::vector<ValueId> alive_;
};

/// The bytes between the first and the last element.
std::pair<const char*, const char*> range_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* begin = static_cast<const char*>(tensor.data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

/// Which of what a caller holds after the run shares memory.
std::vector<bool> sharing_of(const Outcome& outcome) {
  std::vector<at::Tensor> held = outcome.inputs;
  for (const at::Tensor& output : outcome.outputs) held.push_back(output);
  std::vector<bool> shares;
  for (const at::Tensor& left : held) {
    for (const at::Tensor& right : held) {
      const bool both = left.defined() && right.defined();
      shares.push_back(both && range_of(left).first < range_of(right).second &&
                       range_of(right).first < range_of(left).second);
    }
  }
  return shares;
}

void expect_same_outcome(const Outcome& before, const Outcome& after) {
  for (size_t i = 0; i < before.outputs.size(); ++i) {
    if (before.outputs[i].defined()) {
      EXPECT_TRUE(tensors_bitwise_equal(after.outputs[i], before.outputs[i])) << "output " << i;
    }
  }
  for (size_t i = 0; i < before.inputs.size(); ++i)
    EXPECT_TRUE(tensors_bitwise_equal(after.inputs[i], before.inputs[i])) << "input " << i;
  const auto shared_before = sharing_of(before), shared_after = sharing_of(after);
  for (size_t i = 0; i < shared_before.size(); ++i)
    EXPECT_TRUE(shared_before[i] || !shared_after[i]) << "tensors that were apart share memory";
}

/// The pass, with limits for small tensors. `recomputed` counts values that were.
Pass small_pass(const std::string& name, int64_t& recomputed) {
  auto pass = compiler::find_pass(name, 100);
  if (name == "recompute")
    pass.run = [&](Graph& graph) {
      recomputed += compiler::recompute_in_kernels(graph, 1).values;
      recomputed += compiler::fit_to_budget(graph, 1, /*fuses=*/true).recomputed.values;
    };
  return pass;
}

void expect_passes_keep_results(const Graph& program, const std::vector<std::string>& names,
                                int64_t& recomputed) {
  Graph graph = program;
  const auto inputs = random_inputs(graph);
  const Outcome before = evaluate(graph, inputs);
  for (const std::string& name : names) {
    const std::string text = graph.str();
    SCOPED_TRACE(name + " of\n" + text);
    try {
      compiler::run_passes(graph, {small_pass(name, recomputed)});
      EXPECT_EQ(Graph::parse(graph.str()).str(), graph.str());
      expect_same_outcome(before, evaluate(graph, inputs));
    } catch (const c10::Error& error) {
      ADD_FAILURE() << error.what_without_backtrace();
    }
    if (::testing::Test::HasFailure()) {
      ADD_FAILURE() << "became\n" << graph.str();
      return;
    }
  }
}

std::vector<std::string> exact_passes() {
  auto names = compiler::pass_names();
  std::erase_if(names, [](const std::string& name) { return name.starts_with("compress"); });
  return names;
}

TEST(RandomPrograms, PassesKeepEveryBit) {
  const uint64_t seed = test_seed();
  at::manual_seed(seed);
  std::mt19937_64 random(seed);
  constexpr int kPrograms = 400;
  int64_t recomputed = 0;
  for (int i = 0; i < kPrograms && !HasFailure(); ++i) {
    const Graph program =
        Draw(seed + static_cast<uint64_t>(i)).program(4 + static_cast<int>(random() % 30));
    auto names = exact_passes();
    std::shuffle(names.begin(), names.end(), random);
    expect_passes_keep_results(program, names, recomputed);
  }
  EXPECT_GT(recomputed, 0);
}

}  // namespace
}  // namespace tessera::testing
