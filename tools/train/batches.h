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

/// The text as sequences: its beginning to train on, its end to validate.
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
  /// This rank's part of a fixed selection of what is not trained on, whatever the number of ranks,
  /// and how many sequences of it count: a rank that has none left repeats one. `number` from 0.
  std::pair<Batch, int64_t> validation(int64_t number, int64_t sequences) const;
  /// How many of those there are: enough to tell a trend, not all of a long text.
  int64_t validations(int64_t sequences) const;

  const data::Corpus& corpus() const { return corpus_; }
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
  /// For use on the current stream.
  Batch arrived(const Fetched& fetched) const;

  data::Corpus corpus_;
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

/// What a corpus consists of, for a checkpoint: of so many files that they would make it large,
/// nothing.
nlohmann::json contents_of(const data::Corpus& corpus);
/// What is different, such as "'a.txt' has other content"; empty if that is not known.
std::string difference_of_contents(const nlohmann::json& before, const nlohmann::json& after);

}  // namespace tessera::train
