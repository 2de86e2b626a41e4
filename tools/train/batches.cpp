#include "train/batches.h"

#include <tessera/comm.h>
#include <tessera/parallelize.h>

#include "base/text.h"
#include "train/agreed.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>
#include <vector>

namespace tessera::train {
namespace {

constexpr int64_t kSequencesOfTrend = 64, kSequencesAtEnd = 1024;
constexpr int64_t kMostPartsAhead = 64;

std::string quoted(const nlohmann::json& file) {
  return "'" + printable(file.at(0).get<std::string>()) + "'";
}

using Contents = std::map<std::string, std::string>;

Contents by_name(const nlohmann::json& contents) {
  Contents hashes;
  for (const auto& file : contents) hashes.emplace(file.at(0), file.at(1));
  return hashes;
}

}  // namespace

nlohmann::json contents_of(const Sequences& sequences) {
  constexpr size_t kMostFiles = 4096;
  auto contents = nlohmann::json::array();
  if (sequences.contents().size() > kMostFiles) return contents;
  for (const auto& file : sequences.contents())
    contents.push_back({printable(file.name), file.hash});
  return contents;
}

std::string difference_of_contents(const nlohmann::json& before, const nlohmann::json& after) {
  if (before.empty() || after.empty()) return "";
  const auto old_hashes = by_name(before), hashes = by_name(after);
  for (const auto& file : before) {
    const auto found = hashes.find(file.at(0));
    if (found == hashes.end()) return quoted(file) + " is missing";
    if (found->second != old_hashes.at(file.at(0))) return quoted(file) + " has other content";
  }
  for (const auto& file : after) {
    if (!old_hashes.contains(file.at(0))) return quoted(file) + " is one too many";
  }
  return "the files come in another order";
}

Batches make_batches(const Settings& settings, const Layout& layout, at::Device device) {
  auto batches = agree([&] { return Batches(settings, layout, device); });
  const auto all = gather_bytes(batches.sequences().fingerprint());
  if (std::ranges::count(all, all[0]) == std::ssize(all)) return batches;
  const auto contents = gather_bytes(contents_of(batches.sequences()).dump());
  const auto rank =
      std::ranges::find_if(all, [&](const auto& one) { return one != all[0]; }) - all.begin();
  const auto difference =
      difference_of_contents(nlohmann::json::parse(contents[0]),
                             nlohmann::json::parse(contents[static_cast<size_t>(rank)]));
  throw AgreedError(
      "expected the same text on all ranks, but rank " + std::to_string(rank) +
      " finds other files " + std::string(settings.sft.empty() ? "under --data" : "of --sft") +
      " than rank 0" + (difference.empty() ? "" : ": " + difference) + "; give all hosts the same");
}

namespace {

data::SamplerOptions order_of(const Settings& settings, int64_t rank, int64_t ranks) {
  return {
      .seed = settings.seed, .rank = static_cast<int>(rank), .world_size = static_cast<int>(ranks)};
}

int64_t rows_of(const Settings& settings, const Layout& layout) {
  return settings.batch / layout.data_ranks / settings.accumulate;
}

data::Loader make_loader(const std::shared_ptr<const Sequences>& sequences,
                         const Settings& settings, const Layout& layout, at::Device device) {
  const auto read = [sequences](c10::ArrayRef<int64_t> samples) {
    auto batch = sequences->read(samples.vec());
    std::vector<at::Tensor> tensors = {std::move(batch.tokens), std::move(batch.targets)};
    if (batch.positions.defined()) tensors.push_back(std::move(batch.positions));
    return tensors;
  };
  return {sequences->trained(),
          read,
          {.batch_size = rows_of(settings, layout),
           // The parts of a step, while the one before runs.
           .prefetch = std::min(settings.accumulate, kMostPartsAhead),
           .device = device,
           .timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::duration<double>(settings.timeout)),
           .sampler = order_of(settings, layout.data_rank, layout.data_ranks)}};
}

}  // namespace

Batches::Batches(const Settings& settings, const Layout& layout, at::Device device)
    : sequences_(make_sequences(settings)),
      rows_(rows_of(settings, layout)),
      accumulate_(settings.accumulate),
      data_rank_(layout.data_rank),
      data_ranks_(layout.data_ranks),
      context_(layout.context),
      device_(device),
      loader_(make_loader(sequences_, settings, layout, device)),
      of_all_(sequences_->trained(), order_of(settings, /*rank=*/0, /*ranks=*/1)) {}

double Batches::next_weight() {
  const auto parts = static_cast<double>(accumulate_);
  if (!sequences_->has_weights()) return 1 / parts;
  const auto targets_of = [&](c10::ArrayRef<int64_t> some) {
    int64_t sum = 0;
    for (const auto sequence : some) sum += sequences_->targets(sequence);
    return sum;
  };
  if (parts_left_ == 0) {
    auto ahead = of_all_;
    targets_in_batch_ = targets_of(ahead.next(rows_ * data_ranks_ * accumulate_));
    parts_left_ = accumulate_;
  }
  --parts_left_;
  const auto all = of_all_.next(rows_ * data_ranks_);
  const auto own =
      c10::ArrayRef(all).slice(static_cast<size_t>(data_rank_ * rows_), static_cast<size_t>(rows_));
  return static_cast<double>(targets_of(own)) * static_cast<double>(data_ranks_) /
         static_cast<double>(targets_in_batch_);
}

std::vector<at::Tensor> Batches::take() {
  try {
    return loader_.next();
  } catch (const c10::Error& error) {
    const std::string option = "LoaderOptions::timeout";
    std::string message = error.what_without_backtrace();
    const auto place = message.find(option);
    if (place == message.npos) throw;
    TORCH_CHECK(false, message.replace(place, option.size(), "--timeout"));
  }
}

Batch Batches::next() {
  auto tensors = take();
  Batch batch{.tokens = tensors[0],
              .targets = tensors[1],
              .positions = tensors.size() > 2 ? tensors[2] : at::Tensor(),
              .weight = next_weight()};
  cut(batch);
  return batch;
}

void Batches::cut(Batch& batch) const {
  if (!context_) return;
  for (auto* tensor : {&batch.tokens, &batch.targets})
    *tensor = context_parallel_shard(*tensor, /*seq_dim=*/1, *context_);
}

void Batches::seek(int64_t position) {
  loader_.seek(position);
  of_all_.seek(position);
  parts_left_ = 0;
}

int64_t Batches::selected(Part part) const {
  return std::min(sequences_->validated(), part == Part::End ? kSequencesAtEnd : kSequencesOfTrend);
}

int64_t Batches::validations(Part part) const {
  return (selected(part) + rows_ * data_ranks_ - 1) / (rows_ * data_ranks_);
}

HeldOut Batches::validation(Part part, int64_t number) const {
  const auto taken = selected(part);
  const auto place = [&](int64_t i) {  // spread over the whole of it
    return sequences_->trained() + i * sequences_->validated() / taken;
  };
  std::vector<int64_t> chosen;
  const auto first = (number * data_ranks_ + data_rank_) * rows_;
  for (int64_t i = first; i < std::min(first + rows_, taken); ++i) chosen.push_back(place(i));
  HeldOut part_here;
  for (const auto sequence : chosen) {
    part_here.targets += sequences_->targets(sequence);
    part_here.bytes += sequences_->bytes(sequence);
  }
  if (chosen.empty()) chosen.push_back(place(0));
  part_here.batch = sequences_->read(chosen);
  for (auto* tensor :
       {&part_here.batch.tokens, &part_here.batch.targets, &part_here.batch.positions}) {
    if (tensor->defined()) *tensor = tensor->to(device_);
  }
  cut(part_here.batch);
  return part_here;
}

}  // namespace tessera::train
