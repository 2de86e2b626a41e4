// Collectives that combine what the ranks hold.
#include "comm/collective_bodies.h"
#include "comm/type_names.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>

#include <limits>

namespace tessera::collective_bodies {
namespace {

using c10d::ReduceOp;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string title(at::ScalarType dtype, ReduceOp::RedOpType op, int64_t count) {
  return c10::str(dtype, ", operation ", static_cast<int>(op), ", ", count, " elements");
}

void reduces_every_dtype_by_every_operation(const Setting& setting) {
  // One element more than a cache line of any dtype, and enough to be cut into parts.
  for (const int64_t count : {int64_t{65}, int64_t{40'001}}) {
    for (const auto dtype : dtypes(setting)) {
      for (const auto op : kOps) {
        if (!can_reduce(setting, dtype, op)) continue;
        const auto inputs = samples(setting, {count}, dtype);
        Tensors tensors{inputs[rank()].clone()};
        default_group()->allreduce(tensors, {.reduceOp = op})->wait();
        const auto label = title(dtype, op, count);
        expect_reduced(setting, tensors[0], reduced(setting, inputs, op), label);
        expect_same_bits_on_all_ranks(tensors[0], label);
      }
    }
  }
}

void refuses_operations_without_meaning(const Setting& setting) {
  for (const auto dtype : dtypes(setting)) {
    for (const auto op : kOps) {
      if (has_meaning(dtype, op)) continue;
      SCOPED_TRACE(title(dtype, op, 4));
      auto tensor = at::zeros({4}, setting.on(dtype));
      auto whole = at::zeros({4 * setting.ranks}, setting.on(dtype));
      Tensors one{tensor};
      TensorLists list{Tensors(setting.ranks, tensor)};
      const std::vector<std::function<void()>> calls = {
          [&] { default_group()->allreduce(one, {.reduceOp = op}); },
          [&] { default_group()->allreduce_coalesced(one, {{.reduceOp = op}}); },
          [&] { default_group()->reduce(one, {.reduceOp = op}); },
          [&] { default_group()->reduce_scatter(one, list, {.reduceOp = op}); },
          [&] { backend(setting)->_reduce_scatter_base(tensor, whole, {.reduceOp = op}); }};
      for (const auto& call : calls) {
        EXPECT_THAT(message_of<c10::TypeError>(call),
                    AllOf(HasSubstr(setting.backend + ": "), HasSubstr("has no meaning"),
                          HasSubstr(comm::name_of_dtype(dtype)), HasSubstr("sum")));
      }
    }
  }
  // Nothing was issued: the group still works.
  Tensors tensors{at::ones({3}, setting.on())};
  default_group()->allreduce(tensors)->wait();
  EXPECT_TRUE(tensors[0].eq(setting.ranks).all().item<bool>());
}

void reduces_to_the_root_alone(const Setting& setting) {
  for (const auto dtype : dtypes(setting)) {
    for (int root = 0; root < setting.ranks; ++root) {
      for (const int64_t count : {int64_t{5}, int64_t{70'001}}) {
        const auto inputs = samples(setting, {count}, dtype, root);
        Tensors tensors{inputs[rank()].clone()};
        default_group()->reduce(tensors, {.reduceOp = ReduceOp::SUM, .rootRank = root})->wait();
        const auto label = title(dtype, ReduceOp::SUM, count);
        if (rank() == root) {
          expect_reduced(setting, tensors[0], reduced(setting, inputs, ReduceOp::SUM), label);
        } else {
          testing::expect_bitwise_equal(tensors[0], inputs[rank()], "not the root: " + label);
        }
      }
    }
  }
}

void reduce_scatter_keeps_the_own_part(const Setting& setting) {
  for (const auto dtype : dtypes(setting)) {
    for (const auto op : kOps) {
      if (!can_reduce(setting, dtype, op)) continue;
      for (const int64_t rows : {1, 1001}) {
        const auto inputs = samples(setting, {setting.ranks * rows, 3}, dtype);
        const auto expected =
            reduced(setting, inputs, op).narrow(0, rank() * rows, rows).contiguous();
        const auto label = title(dtype, op, rows * 3);
        auto whole = inputs[rank()].clone();
        auto part = at::zeros({rows, 3}, setting.on(dtype));
        backend(setting)->_reduce_scatter_base(part, whole, {.reduceOp = op})->wait();
        expect_reduced(setting, part, expected, "one tensor: " + label);
        testing::expect_bitwise_equal(whole, inputs[rank()], "the input: " + label);

        Tensors output{at::zeros({rows, 3}, setting.on(dtype))};
        TensorLists list{whole.chunk(setting.ranks)};
        default_group()->reduce_scatter(output, list, {.reduceOp = op})->wait();
        expect_reduced(setting, output[0], expected, "list: " + label);
      }
    }
  }
}

void reduce_scatter_may_write_into_its_input(const Setting& setting) {
  for (const int64_t count : {int64_t{10}, int64_t{100'001}}) {
    const auto inputs = samples(setting, {setting.ranks, count}, at::kFloat);
    auto whole = inputs[rank()].clone();
    auto part = whole[rank()];
    backend(setting)->_reduce_scatter_base(part, whole, {})->wait();
    expect_reduced(setting, part, reduced(setting, inputs, ReduceOp::SUM)[rank()].contiguous());
  }
}

void accumulates_half_types_in_float(const Setting& setting) {
  if (setting.ranks < 3) return;  // rounding twice and once are the same for two operands
  for (const auto& [dtype, large] :
       {std::pair(at::kHalf, 2048.0), std::pair(at::kBFloat16, 256.0)}) {
    // large + 1 rounds to large, large + 2 does not.
    Tensors tensors{at::full({9}, rank() == 0 ? large : 1.0, setting.on(dtype))};
    default_group()->allreduce(tensors)->wait();
    const auto expected = at::full({9}, large + setting.ranks - 1, setting.on()).to(dtype);
    EXPECT_TRUE(tensors[0].equal(expected)) << dtype << ": " << tensors[0];

    // The sum is not a half, its average is.
    Tensors average{at::full({9}, 60'000.0, setting.on(dtype))};
    default_group()->allreduce(average, {.reduceOp = ReduceOp::AVG})->wait();
    EXPECT_TRUE(average[0].equal(at::full({9}, 60'000.0, setting.on(dtype))))
        << dtype << ": " << average[0];
  }
}

void a_nan_on_any_rank_wins(const Setting& setting) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (int holder = 0; holder < setting.ranks; ++holder) {
      for (const auto op : {ReduceOp::MIN, ReduceOp::MAX, ReduceOp::SUM, ReduceOp::PRODUCT}) {
        auto tensor = at::full({67}, rank() + 1, setting.on(dtype));
        if (rank() == holder) tensor[66] = std::numeric_limits<double>::quiet_NaN();
        Tensors tensors{tensor};
        default_group()->allreduce(tensors, {.reduceOp = op})->wait();
        const auto is_nan = tensor.isnan();
        EXPECT_TRUE(is_nan[66].item<bool>()) << title(dtype, op, 67) << ", rank " << holder;
        EXPECT_EQ(is_nan.sum().item<int64_t>(), 1) << title(dtype, op, 67);
      }
    }
  }
}

/// Numbers whose sum depends on the order, and everything that is no number.
at::Tensor awkward(const Setting& setting, int64_t count) {
  const Setting plain{.backend = "", .ranks = 1};
  auto values = sample(plain, rank(), {count}, at::kDouble, 7) *
                at::pow(10.0, sample(plain, rank(), {count}, at::kDouble, 8) * 6);
  auto tensor = values.to(at::kFloat);
  tensor.slice(0, 3, count, 11) =
      std::numeric_limits<float>::infinity() * (rank() % 2 == 0 ? 1 : -1);
  tensor.slice(0, 5, count, 13) = -0.0F;
  tensor.slice(0, 6, count, 17) = 1e-40F;  // subnormal
  // A NaN with the rank in its payload: whose survives must not depend on who looks.
  tensor.view(at::kInt).slice(0, 7, count, 19) = 0x7FC00000 + 16 * rank() + 1;
  return tensor.to(setting.device);
}

void gives_every_rank_the_same_bits_in_every_run(const Setting& setting) {
  for (const int64_t count : {1, 31, 4'099, 65'537, 300'001}) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MAX}) {
      const auto input = awkward(setting, count);
      Tensors first{input.clone()};
      default_group()->allreduce(first, {.reduceOp = op})->wait();
      const auto label = title(at::kFloat, op, count);
      expect_same_bits_on_all_ranks(first[0], label);
      Tensors second{input.clone()};
      default_group()->allreduce(second, {.reduceOp = op})->wait();
      testing::expect_bitwise_equal(second[0], first[0], "again: " + label);
    }
  }
}

void reduces_lists_at_once(const Setting& setting) {
  Tensors tensors;
  Tensors expected;
  for (int i = 0; i < 12; ++i) {
    const auto dtype = i % 3 == 0 ? at::kHalf : i % 3 == 1 ? at::kFloat : at::kLong;
    const int64_t count = i * i * 1000;  // the first is empty, the last needs several rounds
    const auto inputs = samples(setting, {count}, dtype, i);
    tensors.push_back(inputs[rank()].clone());
    expected.push_back(reduced(setting, inputs, ReduceOp::SUM));
  }
  default_group()->allreduce_coalesced(tensors)->wait();
  for (size_t i = 0; i < tensors.size(); ++i)
    expect_reduced(setting, tensors[i], expected[i], c10::str("tensor ", i));

  if (setting.is_nccl()) return;  // which wants at least one, as the group itself does
  Tensors none;
  backend(setting)->allreduce_coalesced(none, {})->wait();
}

}  // namespace

const std::vector<Body>& reduce_bodies() {
  static const std::vector<Body> kBodies = {
      {"ReducesEveryDtypeByEveryOperation", reduces_every_dtype_by_every_operation, true},
      {"RefusesOperationsWithoutMeaning", refuses_operations_without_meaning},
      {"ReducesToTheRootAlone", reduces_to_the_root_alone},
      {"ReduceScatterKeepsTheOwnPart", reduce_scatter_keeps_the_own_part, true},
      {"ReduceScatterMayWriteIntoItsInput", reduce_scatter_may_write_into_its_input, true},
      {"AccumulatesHalfTypesInFloat", accumulates_half_types_in_float},
      {"ANanOnAnyRankWins", a_nan_on_any_rank_wins},
      {"GivesEveryRankTheSameBitsInEveryRun", gives_every_rank_the_same_bits_in_every_run, true},
      {"ReducesListsAtOnce", reduces_lists_at_once, true},
  };
  return kBodies;
}

}  // namespace tessera::collective_bodies
