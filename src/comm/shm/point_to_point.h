#pragma once

#include "comm/device_call.h"
#include "comm/shm/collective.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <list>
#include <mutex>
#include <thread>

namespace tessera::comm::shm {

class P2PWork;

/// Messages between two ranks, apart from the collectives: they match by source, destination and
/// tag, in the order of sending, in whatever order they are waited for. A send is buffered, so it
/// completes without its receiver (unless the tensor lives in shared memory: then it is read in
/// place and the send ends when it has been).
class P2PQueue : public std::enable_shared_from_this<P2PQueue> {
 public:
  explicit P2PQueue(std::shared_ptr<Channel> channel);
  ~P2PQueue();
  P2PQueue(const P2PQueue&) = delete;
  P2PQueue& operator=(const P2PQueue&) = delete;

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
  friend class P2PWork;
  using Works = std::list<c10::intrusive_ptr<P2PWork>>;
  void wait_for(P2PWork& work, std::chrono::milliseconds timeout);
  bool poll(P2PWork& work);
  c10::intrusive_ptr<P2PWork> oldest_send();
  void tell(const Works& ended);
  void start_worker();
  /// Fails everything if one of the messages under way can no longer come.
  void check_all();
  void work_loop();

  // Under the mutex:
  /// Ends what can be ended and returns it; its futures are told without the mutex, for their
  /// callbacks may send.
  Works progress();
  bool try_finish(P2PWork& work);
  bool try_send(P2PWork& work);
  bool try_receive(P2PWork& work);
  bool try_receive_early(P2PWork& work);
  /// Throws unless what a peer sent is what the receive expects.
  void check_fits(const P2PWork& work, uint64_t number, size_t bytes, int dtype);
  /// Whether `later` has to wait for `earlier`: messages between two ranks do not overtake each
  /// other.
  static bool precedes(const P2PWork& earlier, const P2PWork& later);
  /// Puts aside what fills the outbox of `source` (kAnyPeer: of all): none of it is what a receive
  /// waits for.
  void make_room(int source);
  void take(P2PWork& work, P2PEntry& entry);
  P2PEntry* find_sent(int source, int tag);
  void reclaim(Outbox& outbox);
  void end_all(const std::exception_ptr& exception);

  const std::shared_ptr<Channel> owned_;  // works may outlive the group
  struct EarlySend {
    int source;
    int tag;
    int dtype;
    uint64_t number;
    std::vector<uint8_t> content;
  };

  Channel& channel_;
  std::mutex mutex_;
  Works pending_;
  std::list<EarlySend> early_;  // in the order of sending
  uint64_t sent_ = 0;
  std::atomic<uint64_t> issued_{0};  // messages, for errors and the record
  std::atomic<bool> closed_{false};
  std::thread worker_;
};

}  // namespace tessera::comm::shm
