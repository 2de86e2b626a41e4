#include "train/batches.h"

#include <tessera/comm.h>

#include "base/text.h"
#include "train/agreed.h"
#include "train/language_model.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace tessera::train {
namespace {

constexpr int64_t kSequencesOfTrend = 64, kSequencesAtEnd = 1024;

/// Its message about folders without text names the setting, as those about wrong ones do.
data::Corpus corpus_of(const char* flag, const std::vector<std::string>& paths,
                       data::Tokenizer tokenizer) {
  try {
    return data::Corpus(paths, std::move(tokenizer));
  } catch (const c10::ValueError& error) {
    const std::string name = "Corpus: ", message = error.what_without_backtrace();
    TORCH_CHECK_VALUE(!message.starts_with(name + "expected text"), flag, ": ",
                      message.substr(name.size()));
    throw;
  }
}

std::optional<data::Corpus> held_out_of(const Settings& settings,
                                        const data::Tokenizer& tokenizer) {
  if (settings.validation_data.empty()) return std::nullopt;
  auto corpus = corpus_of("--validation-data", settings.validation_data, tokenizer);
  TORCH_CHECK_VALUE(corpus.tokens() > settings.context, "--validation-data: expected at least ",
                    settings.context + 1, " tokens (--context ", settings.context, "), got ",
                    corpus.tokens(), " in ", corpus.files(),
                    " file(s); give more of it or a shorter --context");
  return corpus;
}

/// Whether the end of the text is kept.
bool keeps_end(const Settings& settings) {
  return settings.validation > 0 && settings.validation_data.empty();
}

int64_t validation_part(const Settings& settings, int64_t sequences) {
  if (!keeps_end(settings)) return 0;
  return std::max<int64_t>(
      1, static_cast<int64_t>(settings.validation * static_cast<double>(sequences)));
}

/// Sequences overlap by one token: the last target of one is the first token of the next.
int64_t sequences_of(const data::Corpus& corpus, const Settings& settings) {
  const auto sequences = (corpus.tokens() - 1) / settings.context;
  const int64_t needed = keeps_end(settings) ? 2 : 1;
  TORCH_CHECK_VALUE(sequences >= needed, "train: expected text of at least ",
                    needed * settings.context + 1, " tokens (--context ", settings.context,
                    "), got ", corpus.tokens(), " in ", corpus.files(),
                    " file(s); give more --data or a shorter --context");
  return sequences;
}

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

std::string Batches::fingerprint() const {
  return corpus_.fingerprint() + (held_out_ ? "+" + held_out_->fingerprint() : "");
}

nlohmann::json Batches::contents() const {
  constexpr size_t kMostFiles = 4096;
  auto contents = nlohmann::json::array();
  const auto files = corpus_.contents().size() + (held_out_ ? held_out_->contents().size() : 0);
  if (files > kMostFiles) return contents;
  for (const auto& file : corpus_.contents()) contents.push_back({printable(file.name), file.hash});
  if (!held_out_) return contents;
  for (const auto& file : held_out_->contents())
    contents.push_back({"--validation-data: " + printable(file.name), file.hash});
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
  const auto all = gather_bytes(batches.fingerprint());
  if (std::ranges::count(all, all[0]) == std::ssize(all)) return batches;
  const auto contents = gather_bytes(batches.contents().dump());
  const auto rank =
      std::ranges::find_if(all, [&](const auto& one) { return one != all[0]; }) - all.begin();
  const auto difference =
      difference_of_contents(nlohmann::json::parse(contents[0]),
                             nlohmann::json::parse(contents[static_cast<size_t>(rank)]));
  throw AgreedError("expected the same text on all ranks, but rank " + std::to_string(rank) +
                    " finds other files under --data than rank 0" +
                    (difference.empty() ? "" : ": " + difference) + "; give all hosts the same");
}

Batches::Batches(const Settings& settings, const Layout& layout, at::Device device)
    : corpus_(corpus_of("--data", settings.data, make_tokenizer(settings))),
      held_out_(held_out_of(settings, corpus_.tokenizer())),
      context_(settings.context),
      data_rank_(layout.data_rank),
      data_ranks_(layout.data_ranks),
      device_(device),
      validation_sequences_(held_out_ ? (held_out_->tokens() - 1) / settings.context
                                      : validation_part(settings, sequences_of(corpus_, settings))),
      sampler_(sequences_of(corpus_, settings) - (held_out_ ? 0 : validation_sequences_),
               {.seed = settings.seed,
                .rank = static_cast<int>(layout.data_rank),
                .world_size = static_cast<int>(layout.data_ranks)}) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl devices(device.type());
  copies_ = devices.getStreamFromGlobalPool(device);
}

Batches::Fetched Batches::read(const data::Corpus& corpus,
                               const std::vector<int64_t>& sequences) const {
  const auto windows = [&] {
    try {
      return corpus.windows(sequences, context_, context_ + 1);
    } catch (const c10::ValueError& error) {
      throw TextError(message_of(error));
    }
  }();
  const auto part = [&](int64_t first) { return windows.narrow(1, first, context_).contiguous(); };
  Fetched fetched{.batch = {.tokens = part(0), .targets = part(1)}};
  fetched.targets = fetched.batch.targets;
  if (device_.is_cpu()) return fetched;
  const c10::StreamGuard on_copies(*copies_);
  for (auto* tensor : {&fetched.batch.tokens, &fetched.batch.targets})
    *tensor = tensor->pin_memory().to(device_, tensor->scalar_type(), /*non_blocking=*/true);
  fetched.copied.emplace(device_.type());
  fetched.copied->record(*copies_);
  return fetched;
}

Batch Batches::arrived(const Fetched& fetched) const {
  if (fetched.copied) {
    const c10::impl::VirtualGuardImpl devices(device_.type());
    const auto current = devices.getStream(device_);
    fetched.copied->block(current);
    for (const auto& tensor : {fetched.batch.tokens, fetched.batch.targets})
      tensor.record_stream(current);
  }
  return fetched.batch;
}

void Batches::prefetch(int64_t sequences) {
  Fetched fetched;
  try {
    fetched = read(corpus_, sampler_.next(sequences));
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
  sampler_.seek(position);
  position_ = position;
}

int64_t Batches::selected(Part part) const {
  return std::min(validation_sequences_, part == Part::End ? kSequencesAtEnd : kSequencesOfTrend);
}

int64_t Batches::validations(Part part, int64_t sequences) const {
  return (selected(part) + sequences * data_ranks_ - 1) / (sequences * data_ranks_);
}

HeldOut Batches::validation(Part part, int64_t number, int64_t sequences) const {
  const auto taken = selected(part);
  const auto begin = held_out_ ? 0 : sampler_.samples();
  const auto place = [&](int64_t i) {  // spread over the whole of it
    return begin + i * validation_sequences_ / taken;
  };
  std::vector<int64_t> chosen;
  const auto first = (number * data_ranks_ + data_rank_) * sequences;
  for (int64_t i = first; i < std::min(first + sequences, taken); ++i) chosen.push_back(place(i));
  HeldOut part_here{.batch = {}, .sequences = static_cast<int64_t>(chosen.size())};
  if (chosen.empty()) chosen.push_back(place(0));
  const auto fetched = read(held_out(), chosen);
  part_here.batch = arrived(fetched);
  if (part_here.sequences > 0) {
    const at::ArrayRef<int64_t> targets(fetched.targets.const_data_ptr<int64_t>(),
                                        static_cast<size_t>(fetched.targets.numel()));
    part_here.bytes = std::ssize(corpus_.tokenizer().decode(targets));
  }
  return part_here;
}

}  // namespace tessera::train
