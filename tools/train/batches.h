#pragma once

#include <tessera/corpus.h>
#include <tessera/data.h>

#include "train/parallelize.h"

#include <c10/core/Event.h>
#include <nlohmann/json.hpp>

#include <deque>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

namespace tessera::train {

struct Batch {
  at::Tensor tokens;   // [sequences, context]
  at::Tensor targets;  // the tokens after them
};

/// Text that is not as it was when the run began: no checkpoint of the run goes with it.
class TextError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// This rank's part of what is validated on.
struct HeldOut {
  Batch batch;
  int64_t sequences = 0;  // that count: a rank that has none left repeats one
  int64_t bytes = 0;      // of the text that their targets stand for
};

/// The text as sequences: its beginning to train on, its end, or --validation-data, to validate.
class Batches {
 public:
  /// Throws a ValueError if the text is too short for one sequence of each.
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

  const data::Corpus& corpus() const { return corpus_; }
  /// Of all texts, those to validate on among them.
  std::string fingerprint() const;
  /// What they consist of, for a checkpoint: of so many files that they would make it large,
  /// nothing.
  nlohmann::json contents() const;
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
    at::Tensor targets = {};                          // on the CPU
    std::exception_ptr problem = nullptr;  // told when it is asked for: what is done is saved first
  };

  Fetched read(const data::Corpus& corpus, const std::vector<int64_t>& sequences) const;
  /// For use on the current stream.
  Batch arrived(const Fetched& fetched) const;

  int64_t selected(Part part) const;
  const data::Corpus& held_out() const { return held_out_ ? *held_out_ : corpus_; }

  data::Corpus corpus_;
  std::optional<data::Corpus> held_out_;  // of --validation-data
  int64_t context_;
  int64_t data_rank_, data_ranks_;
  at::Device device_;
  int64_t validation_sequences_;
  data::ShardedSampler sampler_;
  std::optional<c10::Stream> copies_;  // none on the CPU
  std::deque<Fetched> fetched_;
  int64_t position_ = 0;
};

/// The same on all ranks, which would train other models otherwise: throws an AgreedError that
/// names the file that differs. Every rank calls it.
Batches make_batches(const Settings& settings, const Layout& layout, at::Device device);

/// What is different, such as "'a.txt' has other content"; empty if that is not known.
std::string difference_of_contents(const nlohmann::json& before, const nlohmann::json& after);

}  // namespace tessera::train
