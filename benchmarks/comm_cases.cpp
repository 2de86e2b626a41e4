#include "comm_cases.h"

#include <torch/torch.h>

namespace tessera::benchmarks {
namespace {

struct Problem {
  c10::ScalarType dtype;
  int64_t elements;  // of the larger side; divisible by the number of ranks
  Group group;
  c10::Device device;
  bool shared;

  int64_t ranks() const { return group->getSize(); }
  c10::intrusive_ptr<c10d::Backend> backend() const { return group->getBackend(device.type()); }
  at::Tensor make(int64_t count) const {
    const auto options = at::TensorOptions(dtype).device(device);
    return shared ? empty_shared({count}, options, group) : at::empty({count}, options);
  }
};

/// Small whole numbers, exact in every dtype, different on every rank and in every part.
at::Tensor values(int64_t count, int64_t rank, c10::ScalarType dtype) {
  return (at::arange(count, at::kLong).remainder(5) + rank).to(dtype);
}

void require(const std::string& op, const at::Tensor& actual, const at::Tensor& expected) {
  TORCH_CHECK(at::equal(actual.cpu(), expected), "bench comm: ", op, " of ", actual.numel(),
              " elements gave a wrong result");
}

/// Waited for at once, so the caller's thread may do the work.
template <class Options>
Options at_once() {
  Options options;
  options.asyncOp = false;
  return options;
}

CommCase all_reduce_case(const Problem& problem) {
  std::vector<at::Tensor> data = {problem.make(problem.elements)};
  auto run = [problem, data]() mutable {
    problem.group->allreduce(data, at_once<c10d::AllreduceOptions>())->wait();
  };
  auto check = [problem, data, run]() mutable {
    data[0].copy_(values(problem.elements, problem.group->getRank(), problem.dtype));
    run();
    const auto expected = values(problem.elements, 0, at::kLong) * problem.ranks() +
                          problem.ranks() * (problem.ranks() - 1) / 2;
    require("all_reduce", data[0], expected.to(problem.dtype));
    data[0].fill_(0);  // repeated sums must not overflow
  };
  return {run, check};
}

CommCase all_gather_case(const Problem& problem) {
  auto output = problem.make(problem.elements);
  auto input = problem.make(problem.elements / problem.ranks());
  auto run = [problem, output, input]() mutable {
    problem.backend()->_allgather_base(output, input, at_once<c10d::AllgatherOptions>())->wait();
  };
  auto check = [problem, output, input, run]() mutable {
    input.copy_(values(input.numel(), problem.group->getRank(), problem.dtype));
    run();
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < problem.ranks(); ++rank)
      parts.push_back(values(input.numel(), rank, problem.dtype));
    require("all_gather_into_tensor", output, at::cat(parts));
  };
  return {run, check};
}

CommCase reduce_scatter_case(const Problem& problem) {
  auto input = problem.make(problem.elements);
  auto output = problem.make(problem.elements / problem.ranks());
  auto run = [problem, output, input]() mutable {
    problem.backend()
        ->_reduce_scatter_base(output, input, at_once<c10d::ReduceScatterOptions>())
        ->wait();
  };
  auto check = [problem, output, input, run]() mutable {
    input.copy_(values(problem.elements, problem.group->getRank(), problem.dtype));
    run();
    const auto sum = values(problem.elements, 0, at::kLong) * problem.ranks() +
                     problem.ranks() * (problem.ranks() - 1) / 2;
    require(
        "reduce_scatter_tensor", output,
        sum.narrow(0, problem.group->getRank() * output.numel(), output.numel()).to(problem.dtype));
  };
  return {run, check};
}

CommCase all_to_all_case(const Problem& problem) {
  auto input = problem.make(problem.elements);
  auto output = problem.make(problem.elements);
  auto run = [problem, output, input]() mutable {
    std::vector<int64_t> equal;
    problem.backend()
        ->alltoall_base(output, input, equal, equal, at_once<c10d::AllToAllOptions>())
        ->wait();
  };
  auto check = [problem, output, input, run]() mutable {
    input.copy_(values(problem.elements, problem.group->getRank(), problem.dtype));
    run();
    const int64_t part = problem.elements / problem.ranks();
    std::vector<at::Tensor> parts;
    for (int64_t rank = 0; rank < problem.ranks(); ++rank) {
      parts.push_back(values(problem.elements, rank, problem.dtype)
                          .narrow(0, problem.group->getRank() * part, part));
    }
    require("all_to_all_single", output, at::cat(parts));
  };
  return {run, check};
}

CommCase broadcast_case(const Problem& problem) {
  std::vector<at::Tensor> data = {problem.make(problem.elements)};
  auto run = [problem, data]() mutable {
    problem.group->broadcast(data, at_once<c10d::BroadcastOptions>())->wait();
  };
  auto check = [problem, data, run]() mutable {
    data[0].copy_(values(problem.elements, problem.group->getRank(), problem.dtype));
    run();
    require("broadcast", data[0], values(problem.elements, 0, problem.dtype));
  };
  return {run, check};
}

CommCase barrier_case(const Problem& problem) {
  auto run = [problem] { problem.group->barrier(at_once<c10d::BarrierOptions>())->wait(); };
  return {run, run};
}

struct Row {
  const char* op;
  CommCase (*make)(const Problem&);
};
constexpr Row kRows[] = {
    {"all_reduce", all_reduce_case},
    {"all_gather_into_tensor", all_gather_case},
    {"reduce_scatter_tensor", reduce_scatter_case},
    {"all_to_all_single", all_to_all_case},
    {"broadcast", broadcast_case},
    {"barrier", barrier_case},
};

}  // namespace

const std::vector<std::string>& comm_ops() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& row : kRows) all.emplace_back(row.op);
    return all;
  }();
  return names;
}

CommCase make_case(const std::string& op, c10::ScalarType dtype, int64_t bytes, const Group& group,
                   c10::Device device, bool shared) {
  const int64_t ranks = group->getSize();
  const auto elements =
      std::max<int64_t>(bytes / static_cast<int64_t>(c10::elementSize(dtype)) / ranks, 1) * ranks;
  for (const auto& row : kRows) {
    if (op == row.op)
      return row.make({.dtype = dtype,
                       .elements = elements,
                       .group = group,
                       .device = device,
                       .shared = shared});
  }
  TORCH_CHECK_VALUE(false, "bench comm: unknown operation '", op, "'; see --list");
}

}  // namespace tessera::benchmarks
