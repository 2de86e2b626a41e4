#pragma once

#include <tessera/detail/compile/step.h>

#include <algorithm>
#include <cstdint>

namespace tessera::compiler {

/// What a recording was made with, as far as it can be told from a call.
struct CallShape {
  struct TensorShape {
    ValueType type;
    bool requires_grad;
    bool is_defined;
    bool is_conj = false, is_neg = false;
    bool has_history = false;  // of autograd
    at::Layout layout = at::kStrided;
    uint64_t distribution = 0;  // of a distributed tensor, 0 of others
    int shares_with = -1;       // the first argument in the same storage
    int64_t distance = 0;       // from its first element
    bool operator==(const TensorShape&) const = default;
  };
  std::vector<TensorShape> tensors;
  std::vector<uint64_t> numbers;
  std::vector<const void*> objects;  // modules and optimizers
  bool grad_mode = true;
  at::ScalarType default_dtype = at::kFloat;
  std::vector<int> autocast;            // by device type: off, or the dtype
  std::vector<double> hyperparameters;  // of optimizers that are not ours, whose numbers are fixed
  std::vector<bool> training;           // of every module below those given
  std::vector<const void*> parameters;  // and theirs

  bool operator==(const CallShape&) const = default;
};
/// The tensors given, of distributed ones this rank's parts.
std::vector<at::Tensor> local_tensors(const detail::StepArguments& given);
CallShape shape_of(const detail::StepArguments& given,
                   const std::vector<torch::nn::Module*>& modules,
                   const std::vector<torch::optim::Optimizer*>& optimizers);
/// What tells the parameters of these modules themselves from others in their place.
std::vector<const void*> parameters_of(const std::vector<torch::nn::Module*>& modules);
/// In what two calls differ, for a user; empty if in nothing.
std::string difference(const CallShape& before, const CallShape& after);

/// Note [recorded again]
/// Guards see what they are told of, and a step may read anything: a number that a lambda captures
/// by reference, what lies behind a pointer. So now and then a call for which there is a program
/// runs eagerly and is recorded, as the first was: its results are right whatever has changed, and
/// a recording that differs tells of the change. This is so at calls 8, 16, … 256 after a program
/// was made, and from then on after so many calls that it costs less than 1 % of their time; of
/// several programs, as many calls in a row. All ranks record the same calls: they count calls of
/// the step, whichever program serves them, and agree on the interval.
class Recheck {
 public:
  /// Whether the next call is to be recorded.
  bool is_due() const { return programs_ > 0 && calls_ + 1 >= next_; }
  int64_t calls() const { return calls_; }  // since a program was made
  /// One was made; `most` are kept.
  void add_program(int64_t most);
  void drop_program() { programs_ = std::max<int64_t>(programs_ - 1, 0); }
  /// A program ran.
  void note_run(double seconds);
  /// Of this rank: calls until the next, if an eager one takes so long.
  int64_t interval(double recorded_seconds) const;
  /// The function still does what the program does; `interval` is the longest of all ranks.
  void pass(int64_t interval);

 private:
  static constexpr int64_t kFirst = 8, kSteady = 256;
  int64_t calls_ = 0, next_ = kFirst;
  int64_t programs_ = 0, passed_ = 0;
  double seconds_ = 0;        // of runs since the last time, but for the first
  double first_seconds_ = 0;  // of the first, which may have to be captured again
  int64_t runs_ = 0;
};

}  // namespace tessera::compiler
