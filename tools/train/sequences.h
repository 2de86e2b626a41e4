#pragma once

#include <tessera/corpus.h>

#include "train/settings.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

/// What a run learns from, as numbered sequences of equal length.
namespace tessera::train {

struct Batch {
  at::Tensor tokens;     // [sequences, context]
  at::Tensor targets;    // the tokens after them; -100 where none is to be learned
  at::Tensor positions;  // of each token in its sample; undefined where each row is one
  double weight = 1;     // of this batch's mean loss in that of the step
};

/// Text that is not as it was when the run began: no checkpoint of the run goes with it.
class TextError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The same on every rank.
class Sequences {
 public:
  virtual ~Sequences() = default;

  /// Sequences 0 to trained() - 1 are trained on, the `validated()` behind them never.
  virtual int64_t trained() const = 0;
  virtual int64_t validated() const = 0;
  /// On the CPU. Throws a TextError.
  virtual Batch read(const std::vector<int64_t>& sequences) const = 0;
  /// How many targets of a sequence count.
  virtual int64_t targets(int64_t sequence) const = 0;
  /// How many bytes of text they stand for; 0: they are no running text.
  virtual int64_t bytes(int64_t sequence) const = 0;
  /// Whether sequences have different numbers of targets.
  virtual bool has_weights() const = 0;

  virtual const data::Tokenizer& tokenizer() const = 0;
  /// Says whether a position still means the same.
  virtual std::string fingerprint() const = 0;
  virtual const std::vector<data::FileContent>& contents() const = 0;
  virtual int64_t tokens() const = 0;
  /// "1000 tokens of text in 3 files".
  virtual std::string described() const = 0;
  /// What a sample of text begins with, and the token that ends it, if any does.
  virtual std::vector<int64_t> prompt(const std::string& text) const = 0;
  virtual std::optional<int64_t> end() const = 0;
};

/// Of --data or --sft. Throws a ValueError if there is too little of it.
std::shared_ptr<const Sequences> make_sequences(const Settings& settings);

/// "1 block", "2 blocks".
std::string counted(int64_t count, const char* thing);

}  // namespace tessera::train
