#pragma once

#include "comm/backends.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <functional>
#include <thread>
#include <vector>

namespace tessera::comm {

using GroupBackend = c10d::Backend;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

/// Runs `body` on `size` threads, each a rank of one gloo group.
inline void run_gloo(int size, const std::function<void(GroupBackend&, int)>& body,
                     std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto backend = gloo::make({.store = store,
                                   .rank = rank,
                                   .size = size,
                                   .group_name = "g",
                                   .world_ranks = {},
                                   .timeout = timeout});
        body(*backend, rank);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace tessera::comm
