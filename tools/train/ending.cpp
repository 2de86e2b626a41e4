// What a run has learned, and its last words.
#include <tessera/comm.h>

#include "base/text.h"
#include "own_program.h"
#include "train/agreed.h"
#include "train/facts.h"
#include "train/generate.h"
#include "train/schedule.h"
#include "train/signals.h"
#include "train/trainer.h"

#include <ATen/ops/tensor.h>

#include <optional>

namespace tessera::train {

void Trainer::validate(Batches::Part part) {
  const auto count = batches_.validations(part);
  if (count == 0) return;
  std::optional<optim::AveragedWeights> averaged;
  if (average_) averaged.emplace(*average_);
  model_->module()->eval();
  double sum = 0, targets = 0, bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto held_out = batches_.validation(part, i);
    const auto counted = static_cast<double>(held_out.targets);
    sum += step_.evaluate(held_out.batch).item<double>() * counted;
    targets += counted;
    bytes += static_cast<double>(held_out.bytes);
  }
  model_->module()->train();
  averaged.reset();
  const auto all =
      all_reduce(at::tensor({sum, targets, bytes}, at::kDouble).to(device_)).to(at::kCPU);
  const auto of_all = [&](int64_t i) { return all[i].item<double>(); };
  const double loss = of_all(0) / of_all(1);
  if (of_all(2) > 0) nats_per_byte_ = of_all(0) / of_all(2);
  journal_.validation(position_.step, loss, nats_per_byte_, position_.seconds);
}

Ending Trainer::finish_stopped() {
  const auto step = std::to_string(position_.step);
  std::string stopped = std::string("stopped by ") + signal_name(stop_.signal);
  if (stop_.sender != 0)
    stopped += ", which process " + std::to_string(stop_.sender) + " sent to rank " +
               std::to_string(stop_.rank) + ",";
  finish_saving();
  if (saved_step_ != position_.step)
    throw AgreedError(stopped + " after step " + step + ", which was left out; nothing was saved",
                      kNotSaved);
  journal_.say(stopped + " after step " + step + "; " + what_is_saved());
  return {.exit_code = 128 + stop_.signal, .first = stop_.sender == 0 ? -1 : stop_.rank};
}

void Trainer::tell_communication() {
  if (steps_read_ == 0) return;
  if (const auto units = units_.mean(); !units.empty())
    journal_.communication(position_.step, units);
}

Ending Trainer::finish() {
  journal_.settle();
  tell_communication();
  if (stop_.signal != 0) return finish_stopped();
  validate(Batches::Part::End);
  finish_saving();
  if (settings_.sample > 0) {
    std::optional<optim::AveragedWeights> averaged;
    if (average_) averaged.emplace(*average_);
    const auto whole = sample_text(*model_, batches_.sequences(), settings_, layout_, device_);
    journal_.say("\n" + printable(whole, "\n\t") + "\n");
    journal_.file("sample.txt", whole);
  }
  const auto last = latest_checkpoint(folder_.checkpoints());
  if (position_.step < settings_.steps)
    journal_.say(stopped_by_time(settings_, position_.step, last ? folder_.path() : ""));
  journal_.say(last ? "saved in " + *last : "nothing is saved");
  const Result result{
      .model = model_->name(),
      .parameters = parameter_count(*model_),
      .seconds = position_.elapsed,
      .tokens = position_.tokens,
      .tokens_per_second = static_cast<double>(position_.tokens) / position_.seconds,
      .ranks = world_size(),
      .nats_per_byte = nats_per_byte_};
  journal_.say(summary_of(result) + "; look at it: " + tool::tessera_command() + " report " +
               folder_.path());
  return {};
}

}  // namespace tessera::train
