#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

namespace tessera::comm {

/// Work that was done when it was returned; its future holds `outputs`.
c10::intrusive_ptr<c10d::Work> completed_work(c10d::OpType type, std::vector<at::Tensor> outputs,
                                              uint64_t sequence = 0);

}  // namespace tessera::comm
