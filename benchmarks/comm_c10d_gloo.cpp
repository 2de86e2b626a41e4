#include "comm_c10d_gloo.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace tessera::benchmarks {

Group make_c10d_gloo() {
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>("bench/c10d_gloo", default_group()->getStore());
  const auto options = c10d::ProcessGroupGloo::Options::create(kDefaultTimeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  const auto backend =
      c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank(), world_size(), options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank(), world_size());
  for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA})
    group->setBackend(device, c10d::ProcessGroup::BackendType::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return group;
}

}  // namespace tessera::benchmarks
