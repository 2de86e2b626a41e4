// Ways in which distributed tensors have given wrong results without a word, elsewhere.
#include "dtensor/placed.h"
#include "support/message_of.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using Function = std::function<at::Tensor(const at::Tensor&)>;

const Tolerance kLongSums{1e-4, 1e-4};

struct Named {
  const char* name;
  Function function;
};

/// Forward and backward of `function` for an input placed so, against one device.
void expect_as_on_one_device(const Named& named, const at::Tensor& whole, const DeviceMesh& mesh,
                             const Placements& placements) {
  const auto label = c10::str(named.name, " of ", whole.sizes(), " ", placements);
  const auto plain = whole.clone().requires_grad_();
  const auto expected = named.function(plain);
  auto leaf = placed(whole, mesh, placements);
  leaf.requires_grad_();
  const auto actual = named.function(leaf);
  expect_equal(full_of(actual), expected.detach(), label, kLongSums);
  const auto gradient = torch::sin(numbered(expected.sizes()));
  expected.backward(gradient);
  actual.backward(placed(gradient, mesh, Placements(placements.size())));
  expect_equal(full_of(leaf.grad()), plain.grad(), label + ", gradient", kLongSums);
}

TEST(KnownTrapsOnThreads, QuantilesAreThoseOfTheWhole) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto levels = torch::tensor({0.25, 0.9}, torch::kFloat);
    const std::vector<Named> functions = {
        {"quantile", [](const at::Tensor& x) { return torch::quantile(x, 0.4); }},
        {"quantile(0)", [](const at::Tensor& x) { return torch::quantile(x, 0.5, 0); }},
        {"quantile(1, keepdim)",
         [](const at::Tensor& x) { return torch::quantile(x, 0.3, 1, true); }},
        {"nanquantile", [](const at::Tensor& x) { return torch::nanquantile(x, 0.5, 0); }},
        {"quantiles",
         [&](const at::Tensor& x) {
           const ImplicitReplication same;
           return torch::quantile(x, levels, 0);
         }},
    };
    const auto whole = torch::sin(numbered({5, 4}));
    for (const auto& named : functions) {
      for (const auto& placement : {Shard(0), Shard(1), Replicate(), Partial()}) {
        expect_equal(full_of(named.function(placed(whole, mesh, {placement}))),
                     named.function(whole), c10::str(named.name, " ", placement), kLongSums);
        expect_as_on_one_device(named, whole, mesh, {placement});
      }
    }
    EXPECT_THAT(message_of<c10::Error>(
                    [&] { torch::quantile(placed(whole, mesh, {Shard(0)}), levels, 0); }),
                HasSubstr("argument 'q' is a plain tensor of sizes [2]"));
  });
}

TEST(KnownTrapsOnThreads, PlainResultsTakeTheWholeIfTheyMay) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({5, 4}), other = numbered({4, 3});
    for (const auto& placement : {Shard(0), Shard(1), Replicate(), Partial()}) {
      const auto tensor = placed(whole, mesh, {placement});
      auto out = torch::full({5}, kInfinity);
      EXPECT_THAT(message_of<c10::Error>([&] { torch::sum_out(out, tensor, 1); }),
                  HasSubstr("ImplicitReplication"));
      auto number = torch::full({}, kInfinity);
      EXPECT_THAT(message_of([&] { torch::sum_out(number, tensor, at::IntArrayRef{0, 1}); }),
                  HasSubstr("inside an ImplicitReplication scope a plain one takes the whole"));
      const ImplicitReplication same;
      torch::sum_out(out, tensor, 1);
      expect_equal(out, whole.sum(1), c10::str(placement), kLongSums);
      torch::sum_out(number, tensor, at::IntArrayRef{0, 1});
      expect_equal(number, whole.sum(), c10::str(placement), kLongSums);
      auto product = torch::empty({0});
      torch::mm_out(product, tensor, placed(other, mesh, {Shard(1)}));
      expect_equal(product, torch::mm(whole, other), c10::str(placement), kLongSums);
    }
  });
}

TEST(KnownTrapsOnThreads, ScalarsOfWholeNumbersAreTakenAlikeByRanksWithNothing) {
  on_mesh({4}, [](const DeviceMesh& mesh) {  // of 5 rows the last rank has none
    const auto addend = torch::arange(6).view({2, 3});
    const auto left = torch::arange(20).view({2, 2, 5}), right = torch::arange(30).view({2, 5, 3});
    for (const double beta : {2.0, 1.7, 0.0}) {
      expect_equal(full_of(torch::addmm(placed(addend, mesh, {Replicate()}),
                                        placed(left[0], mesh, {Shard(1)}),
                                        placed(right[0], mesh, {Shard(0)}), beta, 3.2)),
                   torch::addmm(addend, left[0], right[0], beta, 3.2));
      expect_equal(
          full_of(torch::addbmm(placed(addend, mesh, {Replicate()}), placed(left, mesh, {Shard(0)}),
                                placed(right, mesh, {Shard(0)}), beta, 3.2)),
          torch::addbmm(addend, left, right, beta, 3.2));
    }
  });
}

TEST(KnownTrapsOnThreads, ANumberIsAddedToAProductWhereARankHasNoRow) {
  on_mesh({3}, [](const DeviceMesh& mesh) {  // of 2 rows the last rank has none
    torch::manual_seed(5);
    const auto matrix = torch::randn({2, 4}), vector = torch::randn({4});
    const auto addend = torch::tensor(1.5);
    expect_equal(
        full_of(torch::addmv(placed(addend, mesh, {Replicate()}), placed(matrix, mesh, {Shard(0)}),
                             placed(vector, mesh, {Replicate()}))),
        torch::addmv(addend, matrix, vector));
  });
}

TEST(KnownTrapsOnThreads, DtypesShareNoRememberedChoice) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const std::vector<Named> functions = {
        {"sum", [](const at::Tensor& x) { return x.sum(); }},
        {"sum(1)", [](const at::Tensor& x) { return x.sum(1); }},
        {"add", [](const at::Tensor& x) { return x + x; }},
        {"div", [](const at::Tensor& x) { return x / 2; }},
        {"mul(0.5)", [](const at::Tensor& x) { return x * 0.5; }},
        {"any", [](const at::Tensor& x) { return x.any(); }},
        {"cumsum", [](const at::Tensor& x) { return x.cumsum(0); }},
        {"sort", [](const at::Tensor& x) { return std::get<0>(x.sort(1)); }},
        {"to", [](const at::Tensor& x) { return x.to(torch::kDouble); }},
        {"zeros_like", [](const at::Tensor& x) { return torch::zeros_like(x); }},
    };
    const auto whole = torch::arange(20).view({5, 4}) % 3;
    for (const auto& [name, function] : functions) {
      for (const auto& placement : {Shard(0), Shard(1), Replicate()}) {
        for (const auto dtype : {torch::kFloat, torch::kInt, torch::kBool, torch::kDouble,
                                 torch::kByte, torch::kFloat, torch::kBool}) {
          if (dtype == torch::kBool && std::string(name) == "mul(0.5)") continue;
          const auto plain = whole.to(dtype);
          expect_equal(full_of(function(placed(plain, mesh, {placement}))), function(plain),
                       c10::str(name, " of ", dtype, " ", placement));
        }
      }
    }
  });
}

TEST(KnownTrapsOnThreads, ScalarArgumentsShareNoRememberedChoice) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({4, 6});
    const auto tensor = placed(whole, mesh, {Shard(0)});
    for (const double value : {1.0, 2.0, -0.0, 0.5}) {
      expect_equal(full_of(tensor * value), whole * value);
      expect_equal(full_of(torch::clamp_min(tensor, value)), torch::clamp_min(whole, value));
    }
    for (const int64_t dim : {0, 1, -1, -2}) {
      for (const bool keepdim : {false, true})
        expect_equal(full_of(tensor.sum(dim, keepdim)), whole.sum(dim, keepdim), "", kLongSums);
    }
    expect_equal(full_of(tensor + 1), whole + 1);
    expect_equal(full_of(tensor.to(torch::kLong) + 1), whole.to(torch::kLong) + 1);
    expect_equal(full_of(tensor.to(torch::kLong) + 1.5), whole.to(torch::kLong) + 1.5);
  });
}

std::vector<Named> shape_functions() {
  return {
      {"exp", [](const at::Tensor& x) { return torch::exp(x * 0.1); }},
      {"x + x", [](const at::Tensor& x) { return x + x; }},
      {"x.t() mm x", [](const at::Tensor& x) { return torch::mm(x.t(), x); }},
      {"x mm x.t()", [](const at::Tensor& x) { return torch::mm(x, x.t()); }},
      {"sum", [](const at::Tensor& x) { return x.sum(); }},
      {"sum(0)", [](const at::Tensor& x) { return x.sum(0); }},
      {"sum(1)", [](const at::Tensor& x) { return x.sum(1); }},
      {"mean(0)", [](const at::Tensor& x) { return x.mean(0); }},
      {"softmax(0)", [](const at::Tensor& x) { return torch::softmax(x, 0); }},
      {"flatten", [](const at::Tensor& x) { return x.flatten(); }},
      {"reshape", [](const at::Tensor& x) { return x.reshape({x.size(1), x.size(0)}); }},
      {"unflatten", [](const at::Tensor& x) { return x.reshape({x.size(0), 2, x.size(1) / 2}); }},
      {"t", [](const at::Tensor& x) { return x.t(); }},
      {"slice", [](const at::Tensor& x) { return x.narrow(0, 1, x.size(0) - 1); }},
      {"select", [](const at::Tensor& x) { return x.select(0, x.size(0) - 1); }},
      {"cat", [](const at::Tensor& x) { return torch::cat({x, x * 2}, 0); }},
      {"flip", [](const at::Tensor& x) { return x.flip(0); }},
  };
}

TEST(KnownTrapsOnThreads, TwoMeshDimensionsOnOneTensorDimension) {
  for (const auto& shape : {MeshShape{2, 2}, MeshShape{2, 3}}) {
    on_mesh(shape, [](const DeviceMesh& mesh) {
      const std::vector<Placements> all = {{Shard(0), Shard(0)},
                                           {Shard(1), Shard(1)},
                                           {StridedShard(0, mesh.size(1)), Shard(0)},
                                           {StridedShard(1, mesh.size(1)), Shard(1)}};
      for (const auto& named : shape_functions()) {
        for (const int64_t rows : {12, 7, 5, 3}) {
          for (const auto& placements : all)
            expect_as_on_one_device(named, torch::sin(numbered({rows, 6})), mesh, placements);
        }
      }
    });
  }
}

TEST(KnownTrapsOnThreads, ViewsOfUnevenShards) {
  for (const int64_t ranks : {2, 3, 4}) {
    on_mesh({ranks}, [](const DeviceMesh& mesh) {
      for (const auto& named : shape_functions()) {
        for (const int64_t rows : {5, 7, 3, 2}) {
          for (const auto& placement : {Shard(0), Shard(1), Partial()})
            expect_as_on_one_device(named, torch::sin(numbered({rows, 6})), mesh, {placement});
        }
      }
    });
  }
}

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_cache_enabled(false);
    at::autocast::set_autocast_dtype(torch::kCPU, torch::kBFloat16);
    at::autocast::set_autocast_enabled(torch::kCPU, true);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(torch::kCPU, false);
    at::autocast::set_autocast_cache_enabled(true);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

/// Output and gradients of a layer whose forward alone is under autocast.
std::vector<at::Tensor> autocast_layer(at::Tensor x, at::Tensor w) {
  x.requires_grad_();
  w.requires_grad_();
  at::Tensor y;
  {
    const Autocast scope;
    y = torch::softmax(torch::mm(x, w), 1);
  }
  (y * y).sum().backward();
  return {y, x.grad(), w.grad()};
}

TEST(KnownTrapsOnThreads, AutocastInForwardOnly) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto x = torch::sin(numbered({4, 6}));
    const auto w = torch::cos(numbered({6, 4}));
    const auto expected = autocast_layer(x.clone(), w.clone());
    for (const auto& placements : combinations({Replicate(), Shard(0), Shard(1)}, 2)) {
      const auto label = c10::str(placements);
      const auto actual =
          autocast_layer(placed(x, mesh, {placements[0]}), placed(w, mesh, {placements[1]}));
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(actual[i].dtype(), expected[i].dtype()) << label << ' ' << i;
        expect_equal(full_of(actual[i]), expected[i].detach(), label, Tolerance{3e-2, 2e-2});
      }
      const auto product = [&] {
        return torch::mm(placed(x, mesh, {placements[0]}), placed(w, mesh, {placements[1]}));
      };
      {
        const Autocast scope;
        EXPECT_EQ(product().dtype(), torch::kBFloat16) << label;
      }
      expect_equal(full_of(product()), torch::mm(x, w), label + " after autocast", kLongSums);
    }
  });
}

TEST(KnownTrapsOnThreads, WritesThroughViewsReachTheBaseOrFail) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    auto even = placed(numbered({4, 4}), mesh, {Shard(0)});
    even.view({16}).add_(1);
    expect_equal(even.full_tensor(), numbered({4, 4}) + 1, "no move: a view");
    even.t().mul_(2);
    expect_equal(even.full_tensor(), (numbered({4, 4}) + 1) * 2);

    auto uneven = placed(numbered({5, 4}), mesh, {Shard(0)});
    auto moved = uneven.view({20});
    EXPECT_THAT(message_of<c10::Error>([&] { moved.add_(1); }),
                HasSubstr("add_: the target is a view whose parts had to be moved between ranks"));
    EXPECT_THAT(message_of<c10::Error>([&] { moved.narrow(0, 0, 20).zero_(); }),
                HasSubstr("had to be moved between ranks"));
    expect_equal(uneven.full_tensor(), numbered({5, 4}), "nothing was written");
    expect_equal(full_of(moved), numbered({20}), "but it can be read");
  });
}

TEST(KnownTrapsOnThreads, SlicesOfShardedDimensionsCanBeWritten) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    for (const auto& placement : {Replicate(), Shard(0), Shard(1)}) {
      const auto tensor = placed(numbered({6, 4}), mesh, {placement});
      const auto expected = numbered({6, 4});
      const auto write = [](const at::Tensor& target) {
        target.narrow(0, 1, 3).fill_(9);
        target.select(1, 2).mul_(-1);
      };
      write(expected);
      try {
        write(tensor);
      } catch (const c10::Error& error) {  // refused rather than lost
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr("had to be moved between ranks"));
        EXPECT_TRUE(placement.is_shard());
        continue;
      }
      expect_equal(tensor.full_tensor(), expected, c10::str(placement));
    }
  });
}

TEST(KnownTrapsOnThreads, WritesThatNeedTheTargetElsewhere) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({5, 4});
    const std::vector<std::pair<std::string, std::function<void(at::Tensor)>>> writes = {
        {"cumsum_(0)", [](at::Tensor x) { x.cumsum_(0); }},
        {"cumsum_(1)", [](at::Tensor x) { x.cumsum_(1); }},
        {"tril_", [](at::Tensor x) { x.tril_(); }},
        {"relu_", [](at::Tensor x) { x.relu_(); }},
        {"add_ of another placement",
         [](at::Tensor x) {
           if (!is_dtensor(x)) return void(x.add_(x.clone()));
           const auto mesh = DTensor::of(x).mesh();
           for (const auto& other : {Shard(0), Shard(1), Replicate(), Partial()})
             x.add_(placed(full_of(x) / 4, mesh, {other}));
         }},
        {"copy_", [](at::Tensor x) { x.copy_(x.flip(0)); }},
    };
    for (const auto& [name, write] : writes) {
      auto expected = whole.clone();
      if (name.starts_with("add_")) {
        for (int i = 0; i < 4; ++i) expected.mul_(1.25);
      } else {
        write(expected);
      }
      for (const auto& placement : {Shard(0), Shard(1), Replicate(), Partial()}) {
        const auto label = c10::str(name, " on ", placement);
        auto tensor = placed(whole, mesh, {placement});
        write(tensor);
        EXPECT_EQ(tensor.placements(), Placements{placement}) << label;
        expect_equal(tensor.full_tensor(), expected, label, kLongSums);
      }
    }
  });
}

TEST(KnownTrapsOnThreads, PartialTensorsAreReducedBeforeWhatIsNotLinear) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto whole = numbered({4, 3});
    const std::vector<Named> functions = {
        {"x + 1", [](const at::Tensor& x) { return x + 1; }},
        {"x * x", [](const at::Tensor& x) { return x * x; }},
        {"2 - x", [](const at::Tensor& x) { return 2 - x; }},
        {"relu", [](const at::Tensor& x) { return torch::relu(x); }},
        {"abs", [](const at::Tensor& x) { return torch::abs(x); }},
        {"max", [](const at::Tensor& x) { return x.max(); }},
        {"x > 0", [](const at::Tensor& x) { return (x > 0).to(torch::kFloat) * x; }},
    };
    for (const auto& named : functions) expect_as_on_one_device(named, whole, mesh, {Partial()});
    const std::vector<at::Tensor> summands{placed(whole, mesh, {Partial()})};
    const std::vector<at::Tensor> factors{placed(whole, mesh, {Replicate()})};
    expect_equal(full_of(at::_foreach_mul(summands, summands)[0]), whole * whole, "", kLongSums);
    expect_equal(full_of(at::_foreach_mul(summands, factors)[0]), whole * whole, "", kLongSums);
    expect_equal(full_of(at::_foreach_add(summands, factors)[0]), whole * 2, "", kLongSums);
    expect_equal(full_of(at::_foreach_add(summands, 1)[0]), whole + 1, "", kLongSums);
    const std::vector<at::Tensor> maxima{
        DTensor::from_local(whole + rank(), mesh, {Partial("max")})};
    expect_equal(full_of(at::_foreach_neg(maxima)[0]), -(whole + 2));
    const auto largest = DTensor::from_local(whole + rank(), mesh, {Partial("max")});
    expect_equal(full_of(largest * -1), (whole + 2) * -1, "a factor below zero turns the maximum");
    expect_equal(full_of(largest * 2), (whole + 2) * 2);
    const auto mean = DTensor::from_local(whole + rank(), mesh, {Partial("avg")});
    expect_equal(full_of(mean + mean), (whole + 1) * 2, "", kLongSums);
    expect_equal(full_of(mean + placed(whole, mesh, {Partial()})), whole * 2 + 1, "", kLongSums);
  });
}

}  // namespace
}  // namespace tessera::testing
