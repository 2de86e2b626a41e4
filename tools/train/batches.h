#pragma once

#include <tessera/data.h>

#include "train/parallelize.h"
#include "train/sequences.h"

#include <c10/core/Event.h>
#include <nlohmann/json.hpp>

#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::train {

/// This rank's part of what is validated on.
struct HeldOut {
  Batch batch;
  int64_t targets = 0;  // that count: a rank that has none left repeats a sequence
  int64_t bytes = 0;    // of the text that they stand for; 0: they are no running text
};

/// Sequences as they are dealt out to ranks.
class Batches {
 public:
  /// Throws a ValueError if there is too little to train on or to validate.
  Batches(const Settings& settings, const Layout& layout, at::Device device);

  /// This rank's part of the next `sequences` times the ranks along the batch, on the device as far
  /// as the current stream is concerned. Throws a TextError.
  Batch next(int64_t sequences);
  /// Reads what next() will give and begins to copy it to the device, on a stream of its own.
  /// Throws a TextError.
  void prefetch(int64_t sequences);
  /// How much of what is not trained on: enough to tell a trend, or all that a run's end waits for.
  enum class Part { Trend, End };
  /// This rank's part of a fixed selection of it, whatever the number of ranks; `number` from 0.
  HeldOut validation(Part part, int64_t number, int64_t sequences) const;
  /// How many of those there are.
  int64_t validations(Part part, int64_t sequences) const;

  const Sequences& sequences() const { return *sequences_; }
  /// Of what next() has given.
  int64_t position() const { return position_; }
  int64_t epoch() const { return position_ / sampler_.samples(); }
  int64_t train_sequences() const { return sampler_.samples(); }
  void seek(int64_t position);

 private:
  struct Fetched {
    Batch batch;
    std::optional<c10::Event> copied = std::nullopt;  // none on the CPU
    int64_t end = 0;                                  // the position after it
    std::exception_ptr problem = nullptr;  // told when it is asked for: what is done is saved first
  };

  Fetched read(const std::vector<int64_t>& sequences) const;
  /// The next `count` of all ranks, and this rank's part of them.
  std::pair<std::vector<int64_t>, std::vector<int64_t>> draw(int64_t count);
  /// The weight of the mean loss over this rank's targets in the part of a batch that comes next:
  /// gradients are averaged over ranks, and parts added up.
  double next_weight(const std::vector<int64_t>& all, const std::vector<int64_t>& own);
  /// For use on the current stream.
  Batch arrived(const Fetched& fetched) const;
  /// How many sequences.
  int64_t selected(Part part) const;

  std::shared_ptr<const Sequences> sequences_;
  int64_t accumulate_;
  int64_t data_rank_, data_ranks_;
  at::Device device_;
  data::ShardedSampler sampler_;       // of all ranks' sequences
  int64_t parts_left_ = 0;             // of a batch whose targets are counted
  int64_t targets_in_batch_ = 0;       // of all ranks
  std::optional<c10::Stream> copies_;  // none on the CPU
  std::deque<Fetched> fetched_;
  int64_t position_ = 0;
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
