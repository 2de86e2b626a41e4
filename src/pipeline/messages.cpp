#include "pipeline/messages.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

namespace tessera::detail::pipeline {
namespace {

using Kind = PipelineAction::Kind;

/// A form travels as numbers: dtype, whether it requires grad, how many dimensions, and these.
constexpr int64_t kMostDims = 12;
constexpr int64_t kFormLength = 3 + kMostDims;

/// Of `rank` in the group that it has with `other`.
int place_in_pair(int rank, int other) { return rank > other ? 1 : 0; }

/// What an action sends; none if its stage is the last of its way.
std::optional<MessageKey> sent_by(const PipelineAction& action, int stages) {
  if (action.kind == Kind::Forward && action.stage + 1 < stages)
    return MessageKey{false, action.stage + 1, action.microbatch};
  const bool is_backward = action.kind == Kind::Backward || action.kind == Kind::BackwardInput;
  if (is_backward && action.stage > 0) return MessageKey{true, action.stage - 1, action.microbatch};
  return std::nullopt;
}

}  // namespace

std::string to_string(const MessageForm& form) {
  return c10::str(c10::toString(form.dtype), " ", c10::IntArrayRef(form.sizes),
                  form.requires_grad ? "" : " without gradient");
}

Messages::Messages(const Group& group, const PipelineTable& table)
    : table_(table), rank_(rank(group)) {
  const auto& owners = table.stage_ranks;
  std::set<std::pair<int, int>> pairs;  // in one order on all ranks
  for (size_t stage = 1; stage < owners.size(); ++stage) {
    if (owners[stage - 1] != owners[stage])
      pairs.insert(std::minmax({owners[stage - 1], owners[stage]}));
  }
  const auto all = ranks(group);
  for (const auto& [low, high] : pairs) {
    if (low != rank_ && high != rank_) continue;
    const std::vector<int> both{all[static_cast<size_t>(low)], all[static_cast<size_t>(high)]};
    auto up = new_group(both, {.description = "pipeline, to higher ranks"});
    auto down = new_group(both, {.description = "pipeline, to lower ranks"});
    pairs_.emplace(std::pair(low, high), Pair{std::move(up), std::move(down)});
  }
}

void Messages::begin(const std::vector<std::vector<PipelineAction>>& actions, c10::Device device,
                     bool trains) {
  device_ = device;
  passing_.clear();
  forms_ = trains ? &known_ : &passing_;
  to_come_.clear();
  incoming_.clear();
  const auto stages = static_cast<int>(table_.stage_ranks.size());
  for (size_t source = 0; source < actions.size(); ++source) {
    if (static_cast<int>(source) == rank_) continue;
    for (const auto& action : actions[source]) {
      const auto key = sent_by(action, stages);
      if (key && rank_of(key->stage) == rank_) to_come_[static_cast<int>(source)].push_back(*key);
    }
  }
}

int Messages::source_of(const MessageKey& key) const {
  return rank_of(key.stage + (key.is_gradient ? 1 : -1));
}

const Group& Messages::group_to(int source, int destination) const {
  const auto& pair = pairs_.at(std::minmax(source, destination));
  return source < destination ? pair.up : pair.down;
}

std::string Messages::describe(const MessageKey& key, bool is_sender) const {
  const int other = key.stage + (key.is_gradient ? 1 : -1);
  return c10::str("pipeline: rank ", rank_, is_sender ? " sent" : " waited for", " the ",
                  key.is_gradient ? "gradient" : "activation", " of microbatch ", key.microbatch,
                  " from stage ", other, " (rank ", rank_of(other), ") to stage ", key.stage,
                  " (rank ", rank_of(key.stage), ")");
}

void Messages::wait(c10d::Work& work, const MessageKey& key, bool is_sender) const {
  try {
    work.wait();
  } catch (c10::Error& error) {
    error.add_context(describe(key, is_sender));
    throw;
  }
}

/// The gradient of an activation that this rank has sent.
const MessageForm* Messages::find_form(const MessageKey& key) const {
  const auto found =
      forms_->find({false, key.is_gradient ? key.stage + 1 : key.stage, key.microbatch});
  return found == forms_->end() ? nullptr : &found->second;
}

bool Messages::may_come(const MessageKey& key) const {
  const auto* form = find_form(key);
  return !key.is_gradient || (form != nullptr && form->requires_grad);
}

void Messages::send_form(const MessageKey& key, const MessageForm& form, int destination) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(form.sizes.size()) <= kMostDims,
                    "pipeline: expected activations of at most ", kMostDims, " dimensions, got ",
                    form.sizes.size(), " from stage ", key.stage - 1);
  std::vector<int64_t> numbers{static_cast<int64_t>(form.dtype), form.requires_grad ? 1 : 0,
                               static_cast<int64_t>(form.sizes.size())};
  numbers.insert(numbers.end(), form.sizes.begin(), form.sizes.end());
  numbers.resize(kFormLength);
  send_bytes(key, at::tensor(numbers, at::kLong).to(device_), destination);
}

MessageForm Messages::receive_form(const MessageKey& key, int source) {
  std::vector<at::Tensor> numbers{
      at::empty({kFormLength}, at::TensorOptions(device_).dtype(at::kLong))};
  wait(*group_to(source, rank_)->recv(numbers, place_in_pair(source, rank_), 0), key,
       /*is_sender=*/false);
  const auto host = numbers[0].cpu();
  const auto* values = host.const_data_ptr<int64_t>();
  return {.dtype = static_cast<at::ScalarType>(values[0]),
          .sizes = std::vector<int64_t>(values + 3, values + 3 + values[2]),
          .requires_grad = values[1] != 0};
}

void Messages::send_bytes(const MessageKey& key, const at::Tensor& tensor, int destination) {
  std::vector<at::Tensor> one{tensor};
  auto work = group_to(rank_, destination)->send(one, place_in_pair(destination, rank_), 0);
  outgoing_.push_back({tensor, std::move(work), key});
}

void Messages::send(const MessageKey& key, const at::Tensor& tensor, bool requires_grad) {
  const int destination = rank_of(key.stage);
  if (!key.is_gradient) {
    MessageForm form{tensor.scalar_type(), tensor.sizes().vec(), requires_grad};
    const auto known = forms_->find(key);
    TORCH_CHECK_VALUE(known == forms_->end() || known->second == form, "pipeline: expected ",
                      known == forms_->end() ? "" : to_string(known->second), " from stage ",
                      key.stage - 1, " for microbatch ", key.microbatch,
                      ", as in the first step, got ", to_string(form), " on rank ", rank_,
                      "; keep the size of batches, or call reset_shapes() on all ranks before it "
                      "changes");
    if (known == forms_->end()) {
      if (destination != rank_) send_form(key, form, destination);
      forms_->emplace(key, std::move(form));
    }
  }
  if (destination == rank_) {
    incoming_[key] = {tensor, nullptr};
    return;
  }
  reap();
  send_bytes(key, tensor.contiguous(), destination);
}

void Messages::post(const MessageKey& key, int source) {
  if (!may_come(key)) return;
  if (find_form(key) == nullptr) forms_->emplace(key, receive_form(key, source));
  const auto& form = *find_form(key);
  std::vector<at::Tensor> room{at::empty(form.sizes, at::TensorOptions(device_).dtype(form.dtype))};
  auto work = group_to(source, rank_)->recv(room, place_in_pair(source, rank_), 0);
  incoming_[key] = {room[0], std::move(work)};
}

void Messages::post_until(const MessageKey& key, int source) {
  auto& queue = to_come_[source];
  while (!queue.empty() && !incoming_.contains(key)) {
    const auto next = queue.front();
    queue.pop_front();
    post(next, source);
    if (next == key) return;
  }
}

void Messages::expect(const MessageKey& key) {
  if (!looks_ahead_) return;
  const int source = source_of(key);
  if (source == rank_ || incoming_.contains(key)) return;
  // What comes before it has to be known, too.
  for (const auto& before : to_come_[source]) {
    if (find_form(before) == nullptr) return;
    if (before == key) break;
  }
  post_until(key, source);
}

at::Tensor Messages::receive(const MessageKey& key) {
  const int source = source_of(key);
  if (source != rank_) post_until(key, source);
  const auto found = incoming_.find(key);
  TORCH_INTERNAL_ASSERT(found != incoming_.end(), describe(key, /*is_sender=*/false));
  auto [tensor, work] = std::move(found->second);
  incoming_.erase(found);
  if (work) wait(*work, key, /*is_sender=*/false);
  return tensor;
}

/// Frees what has gone. In order: later ones go later.
void Messages::reap() {
  while (!outgoing_.empty() && outgoing_.front().work->isCompleted()) {
    wait(*outgoing_.front().work, outgoing_.front().key, /*is_sender=*/true);
    outgoing_.pop_front();
  }
}

void Messages::end() {
  for (const auto& sent : outgoing_) wait(*sent.work, sent.key, /*is_sender=*/true);
  outgoing_.clear();
  looks_ahead_ = looks_ahead_ || forms_ == &known_;  // what trains sends both ways
}

}  // namespace tessera::detail::pipeline
