#include "train/batches.h"

#include <tessera/comm.h>

#include "base/text.h"
#include "train/agreed.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace tessera::train {
namespace {

constexpr int64_t kSequencesOfTrend = 64, kSequencesAtEnd = 1024;

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

Batches::Batches(const Settings& settings, const Layout& layout, at::Device device)
    : sequences_(make_sequences(settings)),
      accumulate_(settings.accumulate),
      data_rank_(layout.data_rank),
      data_ranks_(layout.data_ranks),
      device_(device),
      sampler_(sequences_->trained(), {.seed = settings.seed, .rank = 0, .world_size = 1}) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl devices(device.type());
  copies_ = devices.getStreamFromGlobalPool(device);
}

Batches::Fetched Batches::read(const std::vector<int64_t>& sequences) const {
  Fetched fetched{.batch = sequences_->read(sequences)};
  if (device_.is_cpu()) return fetched;
  const c10::StreamGuard on_copies(*copies_);
  for (auto* tensor : {&fetched.batch.tokens, &fetched.batch.targets, &fetched.batch.positions}) {
    if (tensor->defined())
      *tensor = tensor->pin_memory().to(device_, tensor->scalar_type(), /*non_blocking=*/true);
  }
  fetched.copied.emplace(device_.type());
  fetched.copied->record(*copies_);
  return fetched;
}

std::pair<std::vector<int64_t>, std::vector<int64_t>> Batches::draw(int64_t count) {
  auto all = sampler_.next(count * data_ranks_);
  const auto first = all.begin() + data_rank_ * count;
  return {all, {first, first + count}};
}

double Batches::next_weight(const std::vector<int64_t>& all, const std::vector<int64_t>& own) {
  const auto parts = static_cast<double>(accumulate_);
  if (!sequences_->has_weights()) return 1 / parts;
  const auto targets_of = [&](const std::vector<int64_t>& some) {
    int64_t sum = 0;
    for (const auto sequence : some) sum += sequences_->targets(sequence);
    return sum;
  };
  if (parts_left_ == 0) {
    targets_in_batch_ = targets_of(all);
    auto ahead = sampler_;
    for (parts_left_ = 1; parts_left_ < accumulate_; ++parts_left_)
      targets_in_batch_ += targets_of(ahead.next(std::ssize(all)));
  }
  --parts_left_;
  return static_cast<double>(targets_of(own)) * static_cast<double>(data_ranks_) /
         static_cast<double>(targets_in_batch_);
}

Batch Batches::arrived(const Fetched& fetched) const {
  if (fetched.copied) {
    const c10::impl::VirtualGuardImpl devices(device_.type());
    const auto current = devices.getStream(device_);
    fetched.copied->block(current);
    for (const auto& tensor :
         {fetched.batch.tokens, fetched.batch.targets, fetched.batch.positions}) {
      if (tensor.defined()) tensor.record_stream(current);
    }
  }
  return fetched.batch;
}

void Batches::prefetch(int64_t sequences) {
  Fetched fetched;
  const auto [all, own] = draw(sequences);
  const auto weight = next_weight(all, own);
  try {
    fetched = read(own);
    fetched.batch.weight = weight;
  } catch (...) {
    fetched.problem = std::current_exception();
  }
  fetched.end = sampler_.position();
  fetched_.push_back(std::move(fetched));
}

Batch Batches::next(int64_t sequences) {
  if (fetched_.empty()) prefetch(sequences);
  const auto first = std::move(fetched_.front());
  fetched_.pop_front();
  if (first.problem) std::rethrow_exception(first.problem);
  TORCH_INTERNAL_ASSERT(first.batch.tokens.size(0) == sequences);
  position_ = first.end;
  return arrived(first);
}

void Batches::seek(int64_t position) {
  fetched_.clear();
  parts_left_ = 0;
  sampler_.seek(position);
  position_ = position;
}

int64_t Batches::selected(Part part) const {
  return std::min(sequences_->validated(), part == Part::End ? kSequencesAtEnd : kSequencesOfTrend);
}

int64_t Batches::validations(Part part, int64_t sequences) const {
  return (selected(part) + sequences * data_ranks_ - 1) / (sequences * data_ranks_);
}

HeldOut Batches::validation(Part part, int64_t number, int64_t sequences) const {
  const auto taken = selected(part);
  const auto place = [&](int64_t i) {  // spread over the whole of it
    return sequences_->trained() + i * sequences_->validated() / taken;
  };
  std::vector<int64_t> chosen;
  const auto first = (number * data_ranks_ + data_rank_) * sequences;
  for (int64_t i = first; i < std::min(first + sequences, taken); ++i) chosen.push_back(place(i));
  HeldOut part_here;
  for (const auto sequence : chosen) {
    part_here.targets += sequences_->targets(sequence);
    part_here.bytes += sequences_->bytes(sequence);
  }
  if (chosen.empty()) chosen.push_back(place(0));
  part_here.batch = arrived(read(chosen));
  return part_here;
}

}  // namespace tessera::train
