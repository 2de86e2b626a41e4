// State of optimizers that somebody has changed: refused by a ValueError, and nothing is changed.
#include <tessera/tessera.h>

#include "support/message_of.h"
#include "support/random.h"
#include "support/tolerance.h"
#include "support/twins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <random>
#include <sstream>

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Random = std::mt19937_64;
using Spoil = std::function<void(OptimizerStateDict&)>;

OptimizerStateDict copy_of(OptimizerStateDict dict) {
  for (auto& [name, fields] : dict.state)
    for (auto& [field, value] : fields) value = value.clone();
  return dict;
}

void expect_same(const OptimizerStateDict& actual, const OptimizerStateDict& expected) {
  ASSERT_EQ(actual.state.size(), expected.state.size());
  for (const auto& [name, fields] : expected.state)
    for (const auto& [field, value] : fields)
      expect_bitwise_equal(actual.state.at(name).at(field), value, name + "/" + field);
  for (size_t g = 0; g < expected.param_groups.size(); ++g)
    EXPECT_EQ(actual.param_groups[g].options, expected.param_groups[g].options);
}

template <class Optimizer>
class HostileState {
 public:
  template <class... Options>
  explicit HostileState(const Options&... options) : optimizer_(net_->parameters(), options...) {
    net_->forward(at::ones({2, 3})).sum().backward();
    optimizer_.step();
    right_ = copy_of(optimizer_state_dict(net_, optimizer_));
  }

  const OptimizerStateDict& right() const { return right_; }

  /// Loads; false if it was refused, by a ValueError that changed nothing.
  bool loads(const OptimizerStateDict& dict, std::string* message = nullptr) {
    try {
      load_optimizer_state_dict(net_, optimizer_, dict);
      load_optimizer_state_dict(net_, optimizer_, right_);
      return true;
    } catch (const c10::ValueError& error) {
      if (message != nullptr) *message = error.what_without_backtrace();
    }
    expect_same(optimizer_state_dict(net_, optimizer_), right_);
    return false;
  }

  std::string refused(const Spoil& spoil) {
    auto dict = copy_of(right_);
    spoil(dict);
    std::string message;
    EXPECT_FALSE(loads(dict, &message));
    EXPECT_THAT(message, ::testing::Not(HasSubstr("report a bug")));
    return message;
  }

 private:
  torch::nn::Linear net_ = seeded(1, [] { return torch::nn::Linear(3, 4); });
  Optimizer optimizer_;
  OptimizerStateDict right_;
};

TEST(HostileOptimizerErrors, NameTheEntry) {
  HostileState<optim::AdamW> state;
  EXPECT_THAT(state.refused([](auto& dict) { dict.param_groups[0].options["lr"] = "fast"; }),
              HasSubstr("load_optimizer_state_dict: group 0: expected a double as option 'lr', got "
                        "a string"));
  EXPECT_THAT(state.refused([](auto& dict) { dict.param_groups[0].options["amsgrad"] = 1; }),
              HasSubstr("expected a bool as option 'amsgrad', got an int"));
  EXPECT_THAT(state.refused([](auto& dict) {
    dict.param_groups[0].options["betas"] = std::make_tuple(0.9, 0.9, 0.9);
  }),
              HasSubstr("expected a tuple of 2 elements as option 'betas', got a tuple of 3"));
  EXPECT_THAT(state.refused([](auto& dict) { dict.param_groups[0].options["fused"] = 0.5; }),
              HasSubstr("expected a bool or None as option 'fused', got a double"));
  EXPECT_THAT(state.refused([](auto& dict) { dict.state["bias"]["step"].fill_(-1); }),
              HasSubstr("expected 'step' of 'bias' to be a whole number from 0 to 2^53, got -1"));
  for (const double step : {1e300, 0.5, std::nan(""), std::numeric_limits<double>::infinity()})
    state.refused(
        [&](auto& dict) { dict.state["bias"]["step"] = at::scalar_tensor(step, at::kDouble); });
  EXPECT_THAT(state.refused([](auto& dict) {
    dict.state["bias"]["exp_avg"] = at::ones({4}, at::kComplexFloat);
  }),
              HasSubstr("expected 'exp_avg' of 'bias' of a dtype like float32, got complex64"));
  EXPECT_THAT(state.refused([](auto& dict) { dict.param_groups.push_back(dict.param_groups[0]); }),
              HasSubstr("once among the parameters of all groups, got it twice"));
  EXPECT_THAT(state.refused([](auto& dict) { dict.kind = "SGD"; }),
              HasSubstr("expected the state of AdamW, got that of SGD"));
  HostileState<torch::optim::AdamW> stock;
  EXPECT_THAT(stock.refused([](auto& dict) { dict.param_groups[0].options["lr"] = -1.0; }),
              HasSubstr("group 0: expected option 'lr' to be at least 0, got -1"));
}

at::Tensor strange_tensor(Random& random) {
  switch (random() % 11) {
    case 0:
      return {};
    case 1:
      return at::ones({4}, at::kLong);
    case 2:
      return at::ones({4, 3}, at::kComplexDouble);
    case 3:
      return at::ones({4, 3}).to_sparse();
    case 4:
      return at::empty({4, 3}, at::TensorOptions(at::kMeta));
    case 5:
      return at::scalar_tensor(std::nan(""));
    case 6:
      return at::scalar_tensor(1e19, at::kDouble);
    case 7:
      return at::ones({0});
    case 8:
      return at::ones({1, 1, 1, 1});
    case 9:
      return at::quantize_per_tensor(at::ones({4}), 1, 0, at::kQInt8);
    default:
      return at::ones({4}, at::kBool);
  }
}

c10::IValue strange_value(Random& random) {
  switch (random() % 10) {
    case 0:
      return {};
    case 1:
      return -1.0;
    case 2:
      return std::nan("");
    case 3:
      return INT64_MIN;
    case 4:
      return "text";
    case 5:
      return std::make_tuple(0.1, 2.0);
    case 6:
      return c10::ivalue::Tuple::create(std::vector<c10::IValue>{});
    case 7:
      return c10::List<double>({0.5, 0.5});
    case 8:
      return at::ones({2});
    default:
      return true;
  }
}

void spoil_one(OptimizerStateDict& dict, Random& random) {
  const auto any = [&](auto& map) { return std::next(map.begin(), random() % map.size()); };
  auto& options = dict.param_groups[0].options;
  switch (random() % 9) {
    case 0:
    case 1:
      any(options)->second = strange_value(random);
      break;
    case 2:
      options.erase(any(options));
      break;
    case 3:
      options["lr2"] = strange_value(random);
      break;
    case 4:
    case 5: {
      auto& fields = any(dict.state)->second;
      if (!fields.empty()) any(fields)->second = strange_tensor(random);
      break;
    }
    case 6:
      any(dict.state)->second["momentum_buffer"] = strange_tensor(random);
      break;
    case 7:
      dict.param_groups[0].params.emplace_back(random() % 2 == 0 ? "bias" : "other");
      break;
    default:
      any(dict.state)->second.clear();
      break;
  }
}

template <class Optimizer, class... Options>
void fuzz(uint64_t count, const Options&... options) {
  HostileState<Optimizer> state(options...);
  Random random(test_seed());
  uint64_t refused = 0;
  for (uint64_t i = 0; i < count && !::testing::Test::HasFailure(); ++i) {
    auto dict = copy_of(state.right());
    for (uint64_t change = 0; change <= random() % 3; ++change) spoil_one(dict, random);
    refused += state.loads(dict) ? 0 : 1;
  }
  EXPECT_GT(refused, count / 2);
}

TEST(HostileOptimizer, IsRefusedOrLoadedAndNothingElse) {
  fuzz<optim::AdamW>(400);
  fuzz<optim::Adam>(200, optim::AdamOptions{.amsgrad = true, .fused = true});
  fuzz<optim::SGD>(200, optim::SGDOptions{.momentum = 0.9});
  fuzz<torch::optim::AdamW>(200);
  fuzz<torch::optim::SGD>(200, torch::optim::SGDOptions(0.1).momentum(0.9));
  fuzz<torch::optim::RMSprop>(200);
  fuzz<torch::optim::Adagrad>(200);
}

/// An archive of one group in torch::save's form, with one thing changed.
std::string archive_error(
    const std::function<void(
        torch::serialize::OutputArchive& top, torch::serialize::OutputArchive& group,
        torch::serialize::OutputArchive& state, torch::serialize::OutputArchive& options)>& spoil,
    const std::string& left_out) {
  using torch::serialize::OutputArchive;
  const auto parameter = at::ones({2}).requires_grad_();
  optim::SGD sgd({parameter}, {.lr = 0.5, .momentum = 0.9});
  const auto cu = std::make_shared<torch::jit::CompilationUnit>();
  OutputArchive top(cu), states(cu), state(cu), groups(cu), group(cu), options(cu);
  const auto write = [&](OutputArchive& archive, const std::string& name,
                         const c10::IValue& value) {
    if (name != left_out) archive.write(name, value);
  };
  write(top, "pytorch_version", "1.5.0");
  for (const char* name : {"lr", "momentum", "dampening", "weight_decay"})
    write(options, name, c10::IValue(0.25));
  write(options, "nesterov", false);
  write(group, "params/size", at::scalar_tensor(1, at::kLong));
  write(group, "params/0", "7");
  write(groups, "param_groups/size", at::scalar_tensor(1, at::kLong));
  write(state, "momentum_buffer", at::ones({2}));
  spoil(top, group, state, options);
  if (left_out != "options") group.write("options", options);
  if (left_out != "param_groups/0") groups.write("param_groups/0", group);
  if (left_out != "7") states.write("7", state);
  if (left_out != "state") top.write("state", states);
  if (left_out != "param_groups") top.write("param_groups", groups);
  std::stringstream file;
  top.save_to(file);
  std::string message;
  try {
    torch::load(sgd, file);
  } catch (const c10::ValueError& error) {
    message = error.what_without_backtrace();
    EXPECT_EQ(sgd.options().lr, 0.5);
    EXPECT_TRUE(sgd.state_of(parameter).empty());
  }
  EXPECT_THAT(message, ::testing::Not(HasSubstr("report a bug")));
  return message;
}

TEST(HostileOptimizerErrors, ArchivesAreReadWholeFirst) {
  const auto left_out = [](const std::string& name) {
    return archive_error([](auto&, auto&, auto&, auto&) {}, name);
  };
  EXPECT_EQ(left_out(""), "");
  EXPECT_EQ(left_out("7"), "");
  EXPECT_THAT(left_out("pytorch_version"), HasSubstr("SGD::load: expected an archive of libtorch"));
  for (const char* name : {"state", "param_groups", "param_groups/0", "options"})
    EXPECT_THAT(left_out(name), HasSubstr(c10::str("expected \"", name, "\" in")));
  EXPECT_THAT(left_out("params/size"), HasSubstr("expected a count as \"params/size\""));
  EXPECT_THAT(left_out("params/0"), HasSubstr("expected the key of parameter 0 of group 0"));
  EXPECT_THAT(left_out("lr"), HasSubstr("SGD::load: group 0: expected the options"));
  const auto added = [](const char* to, const char* name, const c10::IValue& value) {
    const std::string place = to;
    return archive_error(
        [&](auto& top, auto& group, auto& state, auto& options) {
          (place == "top"     ? top
           : place == "group" ? group
           : place == "state" ? state
                              : options)
              .write(name, value);
        },
        name);
  };
  EXPECT_THAT(added("top", "state", at::ones({1})), HasSubstr("expected \"state\" in"));
  EXPECT_THAT(added("top", "tessera_optimizer", "Adam"), HasSubstr("got one of Adam"));
  EXPECT_THAT(added("group", "params/size", "1"), HasSubstr("expected a count"));
  EXPECT_THAT(added("group", "params/size", at::scalar_tensor(int64_t{1} << 60, at::kLong)),
              HasSubstr("parameter group of another size"));
  EXPECT_THAT(added("group", "params/0", 7), HasSubstr("expected the key of parameter 0"));
  EXPECT_THAT(added("options", "lr", "1"), HasSubstr("expected a double as option 'lr'"));
  EXPECT_THAT(added("options", "lr", -1.0), HasSubstr("expected lr of at least 0"));
  EXPECT_THAT(added("state", "momentum_buffer", at::ones({3})),
              HasSubstr("SGD::load: parameter 0 of group 0: expected \"momentum_buffer\" of shape "
                        "[2], got [3]"));
  EXPECT_THAT(added("state", "momentum_buffer", "1"), HasSubstr("expected a tensor or a number"));
  EXPECT_THAT(added("state", "exp_avg", at::ones({2})), HasSubstr("got \"exp_avg\""));
}

}  // namespace
}  // namespace tessera::testing
