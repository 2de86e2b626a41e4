#pragma once

#include "comm/device_call.h"
#include "comm/shm/collective.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <list>
#include <mutex>
#include <thread>

namespace tessera::comm::shm {

class MailWork;

/// Messages between two ranks, apart from the collectives: they match by source, destination and
/// tag, in the order of sending, in whatever order they are waited for. A send is buffered, so it
/// completes without its receiver (unless the tensor lives in shared memory: then it is read in
/// place and the send ends when it has been).
class Mailroom : public std::enable_shared_from_this<Mailroom> {
 public:
  explicit Mailroom(std::shared_ptr<Channel> channel);
  ~Mailroom();
  Mailroom(const Mailroom&) = delete;
  Mailroom& operator=(const Mailroom&) = delete;

  struct Message {
    bool is_send = false;
    int peer = kAnyPeer;
    int tag = 0;
    int dtype = -1;
    Bytes data;
    std::chrono::milliseconds timeout{0};
    at::Tensor original;  // what the caller gave
    at::Tensor
        contiguous;  // whose memory `data` is; copied to `original` at the end if it is another
    std::shared_ptr<DeviceCall> device = {};  // where that copy is made; null: by the host
  };
  c10::intrusive_ptr<c10d::Work> submit(Message message);
  /// Lets sends go out that nobody waited for and ends receives, with an error, and the worker
  /// thread.
  void close();

 private:
  friend class MailWork;
  using Works = std::list<c10::intrusive_ptr<MailWork>>;
  void wait_for(MailWork& work, std::chrono::milliseconds timeout);
  bool poll(MailWork& work);
  c10::intrusive_ptr<MailWork> oldest_send();
  void tell(const Works& ended);
  void start_worker();
  /// Fails everything if one of the messages under way can no longer come.
  void check_all();
  void work_loop();

  // Under the mutex:
  /// Ends what can be ended and returns it; its futures are told without the mutex, for their
  /// callbacks may send.
  Works progress();
  bool try_finish(MailWork& work);
  bool try_send(MailWork& work);
  bool try_receive(MailWork& work);
  bool try_receive_early(MailWork& work);
  /// Throws unless what a peer sent is what the receive expects.
  void check_fits(const MailWork& work, uint64_t number, size_t bytes, int dtype);
  /// Whether `later` has to wait for `earlier`: messages between two ranks do not overtake each
  /// other.
  static bool precedes(const MailWork& earlier, const MailWork& later);
  /// Puts aside what fills the outbox of `source` (kAnyPeer: of all): none of it is what a receive
  /// waits for.
  void make_room(int source);
  void take(MailWork& work, MailEntry& entry);
  MailEntry* find_mail(int source, int tag);
  void reclaim(Outbox& outbox);
  void end_all(const std::exception_ptr& exception);

  const std::shared_ptr<Channel> owned_;  // works may outlive the group
  struct EarlyMail {
    int source;
    int tag;
    int dtype;
    uint64_t number;
    std::vector<uint8_t> content;
  };

  Channel& channel_;
  std::mutex mutex_;
  Works pending_;
  std::list<EarlyMail> early_;  // in the order of sending
  uint64_t sent_ = 0;
  std::atomic<uint64_t> issued_{0};  // messages, for errors and the record
  std::atomic<bool> closed_{false};
  std::thread worker_;
};

}  // namespace tessera::comm::shm
