// Random shapes, dtypes, operations and memory against a plain computation.
#include "comm/collective_bodies.h"
#include "support/random.h"
#include "support/ranks.h"
#include "support/tolerance.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <numeric>
#include <random>

namespace tessera::collective_bodies {
namespace {

using testing::expect_bitwise_equal;

/// One collective as every rank draws it.
struct Draw {
  int number;
  at::ScalarType dtype;
  c10d::ReduceOp::RedOpType op;
  std::vector<int64_t> sizes;
  int root;

  std::string text() const {
    return c10::str("#", number, ": ", dtype, ", operation ", static_cast<int>(op), ", sizes ",
                    at::IntArrayRef(sizes), ", root ", root);
  }
};

class Randomness {
 public:
  explicit Randomness(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t end) {
    return static_cast<int64_t>(engine_() % static_cast<uint64_t>(end));
  }
  template <class T>
  T pick(const std::vector<T>& values) {
    return values[below(static_cast<int64_t>(values.size()))];
  }

  Draw draw(int number, const Setting& setting) {
    Draw result{
        .number = number, .dtype = pick(dtypes(setting)), .op = pick(kOps), .sizes = {}, .root = 0};
    while (!can_reduce(setting, result.dtype, result.op)) result.op = pick(kOps);
    const auto dims = below(4);
    for (int64_t i = 0; i < dims; ++i) result.sizes.push_back(below(9));
    // Now and then more than a slot.
    if (dims > 0 && below(6) == 0) result.sizes[0] = below(40'000);
    result.root = static_cast<int>(below(setting.ranks));
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

/// The same values in another place: as they are, transposed, with gaps, in shared memory (of CPU
/// tensors) or inside a larger tensor there. Every rank draws its own. NCCL takes no gaps.
at::Tensor place(const Setting& setting, const at::Tensor& values, Randomness& own) {
  const auto in_shared = [&](std::vector<int64_t> sizes) {
    return setting.device.is_cpu() ? empty_shared(sizes, values.options())
                                   : at::empty(sizes, values.options());
  };
  switch (setting.is_nccl() ? own.below(2) * 4 : own.below(5)) {
    case 0:
      return values.clone();
    case 1:
      return values.dim() < 2
                 ? values.clone()
                 : values.transpose(0, -1).clone(at::MemoryFormat::Contiguous).transpose(0, -1);
    case 2: {
      auto sizes = values.sizes().vec();
      sizes.push_back(3);
      return at::zeros(sizes, values.options()).select(-1, 1).copy_(values);
    }
    case 3:
      return in_shared(values.sizes().vec()).copy_(values);
    default: {
      auto whole = in_shared({values.numel() + 37});
      return whole.narrow(0, 19, values.numel()).view(values.sizes()).copy_(values);
    }
  }
}

class RandomCollective {
 public:
  RandomCollective(const Setting& setting, const Draw& draw, Randomness& own)
      : setting_(setting), draw_(draw), own_(own) {}

  void run(int64_t kind) {
    SCOPED_TRACE(draw_.text());
    switch (kind) {
      case 0:
        return all_reduce();
      case 1:
        return reduce();
      case 2:
        return broadcast();
      case 3:
        return all_gather();
      case 4:
        return reduce_scatter();
      case 5:
        return gather_and_scatter();
      default:
        return exchange();
    }
  }
  static constexpr int64_t kKinds = 7;

 private:
  Tensors inputs() const { return samples(setting_, draw_.sizes, draw_.dtype, draw_.number); }
  at::Tensor blank(std::vector<int64_t> sizes) {
    return place(setting_, at::zeros(sizes, setting_.on(draw_.dtype)), own_);
  }
  std::vector<int64_t> stacked() const {
    auto sizes = draw_.sizes;
    sizes.insert(sizes.begin(), setting_.ranks);
    return sizes;
  }
  static void expect_moved(const at::Tensor& actual, const at::Tensor& expected) {
    expect_bitwise_equal(actual.contiguous(), expected.contiguous());
  }

  void all_reduce() {
    const auto all = inputs();
    Tensors tensors{place(setting_, all[rank()], own_)};
    default_group()->allreduce(tensors, {.reduceOp = draw_.op})->wait();
    expect_reduced(setting_, tensors[0].contiguous(), reduced(setting_, all, draw_.op));
    expect_same_bits_on_all_ranks(tensors[0]);
  }
  void reduce() {
    const auto all = inputs();
    Tensors tensors{place(setting_, all[rank()], own_)};
    default_group()->reduce(tensors, {.reduceOp = draw_.op, .rootRank = draw_.root})->wait();
    if (rank() != draw_.root) return expect_moved(tensors[0], all[rank()]);
    expect_reduced(setting_, tensors[0].contiguous(), reduced(setting_, all, draw_.op));
  }
  void broadcast() {
    const auto all = inputs();
    Tensors tensors{place(setting_, all[rank()], own_)};
    default_group()->broadcast(tensors, {.rootRank = draw_.root})->wait();
    expect_moved(tensors[0], all[draw_.root]);
  }
  void all_gather() {
    const auto all = inputs();
    auto input = place(setting_, all[rank()], own_);
    auto whole = blank(stacked());
    backend(setting_)->_allgather_base(whole, input, {})->wait();
    expect_moved(whole, at::stack(on_cpu(all)));
    TensorLists list(1);
    for (const auto& part : all) list[0].push_back(blank(part.sizes().vec()));
    Tensors one{input};
    default_group()->allgather(list, one)->wait();
    for (size_t i = 0; i < all.size(); ++i) expect_moved(list[0][i], all[i]);
  }
  void reduce_scatter() {
    const auto all = samples(setting_, stacked(), draw_.dtype, draw_.number);
    auto input = place(setting_, all[rank()], own_);
    auto output = blank(draw_.sizes);
    backend(setting_)->_reduce_scatter_base(output, input, {.reduceOp = draw_.op})->wait();
    const auto expected = reduced(setting_, all, draw_.op)[rank()].contiguous();
    expect_reduced(setting_, output.contiguous(), expected);
  }
  void gather_and_scatter() {
    const auto all = inputs();
    Tensors input{place(setting_, all[rank()], own_)};
    TensorLists lists;
    if (rank() == draw_.root) {
      lists.emplace_back();
      for (const auto& part : all) lists[0].push_back(blank(part.sizes().vec()));
    }
    default_group()->gather(lists, input, {.rootRank = draw_.root})->wait();
    for (size_t i = 0; rank() == draw_.root && i < all.size(); ++i)
      expect_moved(lists[0][i], all[i]);
    Tensors output{blank(draw_.sizes)};
    default_group()->scatter(output, lists, {.rootRank = draw_.root})->wait();
    expect_moved(output[0], all[rank()]);
  }
  /// Splits come from a table that every rank computes alike.
  void exchange() {
    const auto rows = [&](int from, int to) {
      return (draw_.number * 7 + from * 5 + to * 3) % 6 * (draw_.number % 5 == 0 ? 3'001 : 1);
    };
    std::vector<int64_t> sent;
    std::vector<int64_t> received;
    Tensors expected;
    for (int peer = 0; peer < setting_.ranks; ++peer) {
      sent.push_back(rows(rank(), peer));
      received.push_back(rows(peer, rank()));
    }
    const auto table = [&](int from) {
      int64_t total = 0;
      for (int to = 0; to < setting_.ranks; ++to) total += rows(from, to);
      return sample(setting_, from, {total, 2}, draw_.dtype, draw_.number);
    };
    for (int from = 0; from < setting_.ranks; ++from) {
      int64_t before = 0;
      for (int to = 0; to < rank(); ++to) before += rows(from, to);
      expected.push_back(table(from).narrow(0, before, received[from]));
    }
    auto input = place(setting_, table(rank()), own_);
    auto output = blank({std::accumulate(received.begin(), received.end(), int64_t{0}), 2});
    backend(setting_)->alltoall_base(output, input, received, sent, {})->wait();
    expect_moved(output, at::cat(on_cpu(expected)));
  }

  const Setting& setting_;
  const Draw& draw_;
  Randomness& own_;
};

void run_random_collectives(const std::string& backend_name, int cases) {
  const Setting setting{
      .backend = backend_name, .ranks = world_size(), .device = testing::run_device()};
  Randomness shared(testing::test_seed());
  Randomness own(testing::test_seed() + 1 + rank());
  for (int number = 0; number < cases; ++number) {
    const auto draw = shared.draw(number, setting);
    RandomCollective(setting, draw, own).run(shared.below(RandomCollective::kKinds));
    if (::testing::Test::HasFailure()) break;  // the rest would repeat it
  }
  barrier();
}

constexpr std::chrono::seconds kDrawsTimeout{20};

class RandomCollectivesOnThreads : public ::testing::TestWithParam<int> {};
TEST_P(RandomCollectivesOnThreads, AgreeWithAPlainComputation) {
  testing::run_threads(GetParam(), [] { run_random_collectives("shm", 600 / world_size()); },
                       {.backend = "shm", .timeout = kDrawsTimeout});
}
INSTANTIATE_TEST_SUITE_P(Ranks, RandomCollectivesOnThreads, ::testing::Range(2, 9),
                         ::testing::PrintToStringParamName());

TEST(RandomGlooCollectivesOnThreads, AgreeWithAPlainComputation) {
  testing::run_threads(3, [] { run_random_collectives("gloo", 150); },
                       {.backend = "gloo", .timeout = kDrawsTimeout});
}

class RandomCollectivesOnProcesses : public ::testing::TestWithParam<int> {};
TEST_P(RandomCollectivesOnProcesses, AgreeWithAPlainComputation) {
  testing::run_processes(GetParam(), [] { run_random_collectives("shm", 500); },
                         {.backend = "shm", .timeout = kDrawsTimeout});
}
INSTANTIATE_TEST_SUITE_P(Ranks, RandomCollectivesOnProcesses, ::testing::Range(2, 5),
                         ::testing::PrintToStringParamName());

class RandomCollectivesOnCuda : public ::testing::TestWithParam<testing::DeviceCase> {};
TEST_P(RandomCollectivesOnCuda, AgreeWithAPlainComputation) {
  testing::run_on(GetParam(), [] { run_random_collectives(GetParam().backend, 200); },
                  {.timeout = kDrawsTimeout});
}
INSTANTIATE_TEST_SUITE_P(Every, RandomCollectivesOnCuda,
                         ::testing::ValuesIn(testing::cuda_cases({"nccl", "shm", "gloo"})),
                         testing::case_name);

}  // namespace
}  // namespace tessera::collective_bodies
