#pragma once

#include <tessera/comm.h>
#include <tessera/pipeline.h>

#include <deque>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

/// Activations and gradients on their way between ranks.
namespace tessera::detail::pipeline {

/// Of an activation that goes to a stage, or a gradient that goes back to one.
struct MessageKey {
  bool is_gradient = false;
  int stage = 0;  // where it goes
  int microbatch = 0;
  friend auto operator<=>(const MessageKey&, const MessageKey&) = default;
};

/// What ranks tell each other once of an activation; its gradient is of the same shape and dtype.
struct MessageForm {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  bool requires_grad = false;  // whether a gradient comes back
  friend bool operator==(const MessageForm&, const MessageForm&) = default;
};
std::string to_string(const MessageForm& form);

// Note [order of messages]
// Between two ranks messages come in the order in which they were sent; NCCL knows no other. Each
// rank knows the table of all, so it knows that order, and posts receives in it: up to the one it
// needs. Each pair of ranks has a group of its own for each direction: on a GPU a receive that was
// posted early would otherwise stand before a send that it waits for. The first message of a group
// may hold both ranks up until both are there; so in the first step nothing is posted early.
class Messages {
 public:
  /// Collective over the group.
  Messages(const Group& group, const PipelineTable& table);

  /// These actions of all ranks will run. What is no training tells the forms each time.
  void begin(const std::vector<std::vector<PipelineAction>>& actions, c10::Device device,
             bool trains);
  /// A value for `stage`, on this rank or another. Activations tell their form.
  void send(const MessageKey& key, const at::Tensor& tensor, bool requires_grad);
  /// Waits for it, in the current stream.
  at::Tensor receive(const MessageKey& key);
  /// Posts the receive without waiting, if nothing has to be waited for to do so.
  void expect(const MessageKey& key);
  /// Waits until all that was sent has gone.
  void end();

  const MessageForm& form(const MessageKey& activation) const { return forms_->at(activation); }
  void forget_forms() { known_.clear(); }

 private:
  struct Incoming {
    at::Tensor tensor;
    c10::intrusive_ptr<c10d::Work> work;  // null: from this rank
  };
  struct Outgoing {
    at::Tensor tensor;  // until it has gone
    c10::intrusive_ptr<c10d::Work> work;
    MessageKey key;
  };

  int rank_of(int stage) const { return table_.stage_ranks[static_cast<size_t>(stage)]; }
  int source_of(const MessageKey& key) const;
  /// The form of what comes; null while nobody has told.
  const MessageForm* find_form(const MessageKey& key) const;
  bool may_come(const MessageKey& key) const;
  void post(const MessageKey& key, int source);
  void post_until(const MessageKey& key, int source);
  MessageForm receive_form(const MessageKey& key, int source);
  void send_form(const MessageKey& key, const MessageForm& form, int destination);
  void send_bytes(const MessageKey& key, const at::Tensor& tensor, int destination);
  void reap();
  /// Of these two ranks, of which this is one.
  const Group& group_to(int source, int destination) const;
  std::string describe(const MessageKey& key, bool is_sender) const;
  void wait(c10d::Work& work, const MessageKey& key, bool is_sender) const;

  const PipelineTable& table_;
  int rank_;
  struct Pair {
    Group up, down;  // to the higher of the two ranks, and to the lower
  };
  std::map<std::pair<int, int>, Pair> pairs_;  // of this rank, by the lower and the higher one
  bool looks_ahead_ = false;                   // all pairs have met
  c10::Device device_{c10::kCPU};
  using Forms = std::map<MessageKey, MessageForm>;  // of activations that come and go
  Forms known_;                                     // of training, since the first step
  Forms passing_;                                   // of what is no training
  Forms* forms_ = &known_;
  std::map<int, std::deque<MessageKey>> to_come_;  // by source, in the order of their sends
  std::map<MessageKey, Incoming> incoming_;
  std::deque<Outgoing> outgoing_;
};

}  // namespace tessera::detail::pipeline
