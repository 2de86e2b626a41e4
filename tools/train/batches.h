#pragma once

#include <tessera/data.h>

#include "train/parallelize.h"
#include "train/sequences.h"

#include <nlohmann/json.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::train {

/// This rank's part of what is validated on.
struct HeldOut {
  Batch batch;
  int64_t targets = 0;  // that count: a rank that has none left repeats a sequence
  int64_t bytes = 0;    // of the text that they stand for; 0: they are no running text
};

/// Sequences as they are dealt out to ranks, by a data::Loader.
class Batches {
 public:
  /// Throws a ValueError if there is too little to train on or to validate.
  Batches(const Settings& settings, const Layout& layout, at::Device device);

  /// This rank's part of the next sequences of all ranks, on the device as far as the current
  /// stream is concerned. Throws a TextError.
  Batch next();
  /// How much of what is not trained on: enough to tell a trend, or all that a run's end waits for.
  enum class Part { Trend, End };
  /// This rank's part of a fixed selection of it, whatever the number of ranks; `number` from 0.
  HeldOut validation(Part part, int64_t number) const;
  /// How many of those there are.
  int64_t validations(Part part) const;

  const Sequences& sequences() const { return *sequences_; }
  /// Of what next() has given.
  int64_t position() const { return loader_.position(); }
  int64_t epoch() const { return loader_.epoch(); }
  int64_t train_sequences() const { return loader_.samples(); }
  void seek(int64_t position);

 private:
  /// What the loader gives; if it has not come in time, a message for who starts the run.
  std::vector<at::Tensor> take();
  /// The weight of the mean loss over this rank's targets in the part of a batch that comes next:
  /// gradients are averaged over ranks, and parts added up.
  double next_weight();
  /// Of each sequence this rank's part, where it is cut.
  void cut(Batch& batch) const;
  /// How many sequences.
  int64_t selected(Part part) const;

  std::shared_ptr<const Sequences> sequences_;
  int64_t rows_, accumulate_;  // sequences of a part of this rank's batch, and parts
  int64_t data_rank_, data_ranks_;
  std::optional<DeviceMesh> context_;
  at::Device device_;
  data::Loader loader_;
  data::ShardedSampler of_all_;   // of all ranks' sequences, where their targets are counted
  int64_t parts_left_ = 0;        // of a batch whose targets are counted
  int64_t targets_in_batch_ = 0;  // of all ranks
};

/// The same on all ranks, which would train other models otherwise: throws an AgreedError that
/// names the file that differs. Every rank calls it.
Batches make_batches(const Settings& settings, const Layout& layout, at::Device device);

/// What they were made of, for a checkpoint: of so many files that they would make it large,
/// nothing.
nlohmann::json contents_of(const Sequences& sequences);
/// What is different, such as "'a.txt' has other content"; empty if that is not known.
std::string difference_of_contents(const nlohmann::json& before, const nlohmann::json& after);

}  // namespace tessera::train
