#pragma once

#include <tessera/mesh.h>
#include <tessera/replicate.h>

#include "train/language_model.h"
#include "train/settings.h"

#include <optional>

namespace tessera::train {

/// The ranks, by what they are for.
struct Layout {
  DeviceMesh mesh;        // pp, replicas, dp, cp, tp, as far as asked for
  int64_t data_rank = 0;  // which part of the batch is this rank's
  int64_t data_ranks = 1;
  std::optional<DeviceMesh> context;  // along which each sequence is cut
  /// Over which gradients are averaged: dp, and cp, whose ranks have other targets.
  std::optional<DeviceMesh> gradients;
};

c10::DeviceType device_type_of(const Settings& settings);
/// Of this rank. Ranks of a host that are more than its GPUs share them.
c10::Device device_of(const Settings& settings);

/// Of all ranks of the world; every rank calls it.
Layout make_layout(const Settings& settings);

/// What the comm hook remembers; null if it is another hook, or none.
std::shared_ptr<PowerSGDState> make_powersgd(const Settings& settings);

/// Gives the model memory on this rank's device and spreads it over the ranks, with the weights of
/// --from if there are any; every rank calls it, before the optimizer is made.
void parallelize(LanguageModel& model, const Layout& layout, const Settings& settings,
                 const std::shared_ptr<PowerSGDState>& powersgd);

}  // namespace tessera::train
