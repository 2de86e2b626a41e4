// Tensors that are not simply a block of memory.
#include "comm/collective_bodies.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <gmock/gmock.h>

namespace tessera::collective_bodies {
namespace {

using c10d::ReduceOp;
using testing::expect_bitwise_equal;
using ::testing::HasSubstr;

void takes_tensors_without_elements(const Setting& setting) {
  std::vector<int64_t> none;
  for (const auto dtype : dtypes(setting)) {
    Tensors empty{at::empty({0, 3}, setting.on(dtype))};
    auto whole = at::empty({0}, setting.on(dtype));
    TensorLists list{Tensors(setting.ranks, at::empty({0, 3}, setting.on(dtype)))};
    TensorLists at_root;
    if (rank() == 0) at_root = list;
    default_group()->allreduce(empty)->wait();
    default_group()->broadcast(empty)->wait();
    default_group()->reduce(empty)->wait();
    default_group()->allgather(list, empty)->wait();
    default_group()->gather(at_root, empty)->wait();
    default_group()->scatter(empty, at_root)->wait();
    default_group()->reduce_scatter(empty, list)->wait();
    default_group()->alltoall(list[0], list[0])->wait();
    backend(setting)->_allgather_base(whole, empty[0], {})->wait();
    backend(setting)->_reduce_scatter_base(empty[0], whole, {})->wait();
    backend(setting)->alltoall_base(whole, whole, none, none, {})->wait();
  }
}

void takes_scalars(const Setting& setting) {
  Tensors scalar{at::scalar_tensor(rank() + 1.0, setting.on())};
  default_group()->allreduce(scalar)->wait();
  EXPECT_EQ(scalar[0].item<double>(), setting.ranks * (setting.ranks + 1) / 2.0);
  EXPECT_EQ(scalar[0].dim(), 0);
  auto own = at::scalar_tensor(rank(), setting.on(at::kLong));
  auto whole = at::zeros({setting.ranks}, setting.on(at::kLong));
  backend(setting)->_allgather_base(whole, own, {})->wait();
  expect_bitwise_equal(whole, at::arange(setting.ranks, setting.on(at::kLong)));
  backend(setting)->_reduce_scatter_base(own, whole, {})->wait();
  EXPECT_EQ(own.item<int64_t>(), rank() * setting.ranks);
  Tensors root{at::scalar_tensor(rank(), setting.on(at::kHalf))};
  default_group()->broadcast(root, {.rootRank = setting.ranks - 1})->wait();
  EXPECT_EQ(root[0].item<int64_t>(), setting.ranks - 1);
}

/// Transposed and strided views of one base; what lies between the elements must stay.
void reduces_views_in_place(const Setting& setting) {
  for (const int64_t rows : {4, 1001}) {
    const auto make = [&](int peer) {
      return pattern(setting, peer, rows * 300).view({rows, 300});
    };
    auto expected = make(0);
    for (int peer = 1; peer < setting.ranks; ++peer) expected = expected + make(peer);
    for (const bool is_transposed : {false, true}) {
      auto base = make(rank());
      const auto view = [&](const at::Tensor& of) {
        return is_transposed ? of.t() : of.slice(1, 1, 300, 3);
      };
      Tensors tensors{view(base)};
      default_group()->allreduce(tensors)->wait();
      expect_bitwise_equal(view(base).contiguous(), view(expected).contiguous());
      if (is_transposed) continue;
      const auto rest = [](const at::Tensor& of) {
        return at::cat({of.slice(1, 0, 300, 3), of.slice(1, 2, 300, 3)}, 1);
      };
      expect_bitwise_equal(rest(base), rest(make(rank())), "between the elements");
    }
  }
}

void moves_views(const Setting& setting) {
  const int64_t n = setting.ranks;
  const auto make = [&](int peer) {
    return pattern(setting, peer, 24).view({4, 6}).t();
  };  // [6, 4]
  Tensors root{make(rank())};
  default_group()->broadcast(root, {.rootRank = setting.ranks - 1})->wait();
  expect_bitwise_equal(root[0].contiguous(), make(setting.ranks - 1).contiguous(), "broadcast");

  auto input = make(rank());
  auto whole = at::zeros({4, 6 * n}, setting.on()).t();
  backend(setting)->_allgather_base(whole, input, {})->wait();
  Tensors all;
  for (int peer = 0; peer < n; ++peer) all.push_back(make(peer));
  expect_bitwise_equal(whole.contiguous(), at::cat(all), "all_gather_into_tensor");

  auto storage = at::zeros({2 * n, 6, 4}, setting.on());
  TensorLists list(1);
  for (int peer = 0; peer < n; ++peer) list[0].push_back(storage[2 * peer].t().t());
  Tensors one{input};
  default_group()->allgather(list, one)->wait();
  for (int peer = 0; peer < n; ++peer)
    expect_bitwise_equal(storage[2 * peer], make(peer).contiguous(), "all_gather");

  auto part = at::zeros({4, 6}, setting.on()).t();
  backend(setting)->_reduce_scatter_base(part, whole, {})->wait();
  expect_bitwise_equal(part.contiguous(), make(rank()).contiguous() * n, "reduce_scatter_tensor");

  auto rows = at::zeros({6, n}, setting.on()).t();  // [n, 6]
  rows.copy_(pattern(setting, rank(), 6 * n).view({n, 6}));
  auto exchanged = at::zeros({6, n}, setting.on()).t();
  std::vector<int64_t> none;
  backend(setting)->alltoall_base(exchanged, rows, none, none, {})->wait();
  for (int peer = 0; peer < n; ++peer)
    expect_bitwise_equal(exchanged[peer].contiguous(),
                         pattern(setting, peer, 6 * n).view({n, 6})[rank()]);
}

void reads_tensors_whose_elements_share_memory(const Setting& setting) {
  auto input = at::full({1}, rank() + 1, setting.on()).expand({5});
  auto whole = at::zeros({5 * setting.ranks}, setting.on());
  backend(setting)->_allgather_base(whole, input, {})->wait();
  expect_bitwise_equal(
      whole,
      (at::arange(setting.ranks, setting.on(at::kLong)) + 1).to(at::kFloat).repeat_interleave(5));
}

void refuses_to_write_where_elements_share_memory(const Setting& setting) {
  auto expanded = at::zeros({1}, setting.on()).expand({4});
  auto whole = at::zeros({1}, setting.on()).expand({4 * setting.ranks});
  auto input = at::zeros({4}, setting.on());
  auto inputs = at::zeros({4 * setting.ranks}, setting.on());
  std::vector<int64_t> none;
  Tensors one{expanded};
  Tensors plain{input};
  TensorLists list{Tensors(setting.ranks, expanded)};
  TensorLists at_root;
  TensorLists no_list;
  if (rank() == 0) at_root.push_back(inputs.chunk(setting.ranks));
  const std::vector<std::function<void()>> calls = {
      [&] { default_group()->allreduce(one); },
      [&] { default_group()->broadcast(one); },
      [&] { default_group()->reduce(one); },
      [&] { default_group()->allgather(list, plain); },
      [&] { default_group()->scatter(one, at_root); },
      [&] { backend(setting)->_allgather_base(whole, input, {}); },
      [&] { backend(setting)->_reduce_scatter_base(expanded, inputs, {}); },
      [&] { backend(setting)->alltoall_base(whole, inputs, none, none, {}); },
      [&] {
        if (rank() == 0)
          default_group()->gather(list, plain);
        else
          throw c10::ValueError({}, "share memory");
      },
  };
  for (const auto& call : calls)
    EXPECT_THAT(message_of<c10::ValueError>(call), HasSubstr("share memory"));
}

void leaves_autograd_alone(const Setting& setting) {
  auto leaf = at::ones({3}, setting.on()).set_requires_grad(true);
  Tensors tensors{leaf};
  default_group()->allreduce(tensors)->wait();
  EXPECT_TRUE(leaf.is_leaf() && leaf.requires_grad());
  expect_bitwise_equal(leaf.detach(), at::full({3}, setting.ranks, setting.on()));

  auto strided = at::ones({6, 2}, setting.on()).slice(0, 0, 6, 2).detach().set_requires_grad(true);
  Tensors views{strided};
  default_group()->allreduce(views)->wait();
  EXPECT_TRUE(strided.is_leaf());
  EXPECT_TRUE(strided.detach().eq(setting.ranks).all().item<bool>());

  auto computed = leaf * 2;
  auto whole = at::zeros({3 * setting.ranks}, setting.on());
  backend(setting)->_allgather_base(whole, computed, {})->wait();
  EXPECT_FALSE(whole.requires_grad());
  EXPECT_TRUE(whole.eq(2 * setting.ranks).all().item<bool>());
}

void applies_pending_conjugation(const Setting& setting) {
  const auto numbers = [&] {
    return at::complex(at::ones({3}, setting.on()), at::full({3}, 2.0F, setting.on()));
  };
  auto conjugate = rank() == 0 ? numbers().conj() : numbers().conj().resolve_conj();
  Tensors tensors{conjugate};
  backend(setting)->allreduce(tensors, {})->wait();  // the group's dispatcher would hand on a copy
  EXPECT_TRUE(at::imag(conjugate.resolve_conj()).eq(-2 * setting.ranks).all().item<bool>());

  auto input = numbers().conj();
  auto whole = at::zeros({3 * setting.ranks}, setting.on(at::kComplexFloat));
  backend(setting)->_allgather_base(whole, input, {})->wait();
  EXPECT_TRUE(at::imag(whole).eq(-2).all().item<bool>()) << whole;

  auto negative = at::imag(numbers().conj());  // a view with a pending minus
  Tensors negatives{negative};
  backend(setting)->allreduce(negatives, {.reduceOp = ReduceOp::MAX})->wait();
  EXPECT_TRUE(negative.eq(-2).all().item<bool>()) << negative;
}

void refuses_what_is_no_dense_tensor(const Setting& setting) {
  Tensors undefined{at::Tensor()};
  Tensors two{at::ones({2}, setting.on()), at::ones({2}, setting.on())};
  EXPECT_THAT(message_of<c10::ValueError>([&] { backend(setting)->allreduce(undefined, {}); }),
              HasSubstr("undefined"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { backend(setting)->allreduce(two, {}); }),
              HasSubstr("one tensor per rank"));
  Tensors sparse{at::ones({2}, setting.on()).to_sparse()};
  EXPECT_THAT(message_of<c10::ValueError>([&] { backend(setting)->allreduce(sparse, {}); }),
              HasSubstr("dense"));
  Tensors one{at::ones({2}, setting.on())};
  EXPECT_THAT(message_of<c10::ValueError>(
                  [&] { default_group()->broadcast(one, {.rootRank = setting.ranks}); }),
              HasSubstr(c10::str("from 0 to ", setting.ranks - 1, ", got ", setting.ranks)));
  auto input = at::ones({2}, setting.on());
  auto wrong = at::ones({2 * setting.ranks + 1}, setting.on());
  EXPECT_THAT(
      message_of<c10::ValueError>([&] { backend(setting)->_allgather_base(wrong, input, {}); }),
      HasSubstr(c10::str(setting.ranks, " x 2")));
  auto integers = at::ones({2 * setting.ranks}, setting.on(at::kLong));
  EXPECT_THAT(
      message_of<c10::TypeError>([&] { backend(setting)->_allgather_base(integers, input, {}); }),
      HasSubstr("one dtype"));
  std::vector<int64_t> splits(setting.ranks, 2);
  splits[0] = 3;
  auto rows = at::ones({2 * setting.ranks}, setting.on());
  EXPECT_THAT(message_of<c10::ValueError>(
                  [&] { backend(setting)->alltoall_base(rows, rows, splits, splits, {}); }),
              HasSubstr("add up"));
}

}  // namespace

const std::vector<Body>& layout_bodies() {
  static const std::vector<Body> kBodies = {
      {"TakesTensorsWithoutElements", takes_tensors_without_elements, true},
      {"TakesScalars", takes_scalars},
      {"ReducesViewsInPlace", reduces_views_in_place},
      {"MovesViews", moves_views},
      {"ReadsTensorsWhoseElementsShareMemory", reads_tensors_whose_elements_share_memory},
      {"RefusesToWriteWhereElementsShareMemory", refuses_to_write_where_elements_share_memory},
      {"LeavesAutogradAlone", leaves_autograd_alone},
      {"AppliesPendingConjugation", applies_pending_conjugation},
      {"RefusesWhatIsNoDenseTensor", refuses_what_is_no_dense_tensor},
  };
  return kBodies;
}

}  // namespace tessera::collective_bodies
