#pragma once

#include "comm/shm/medium.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace tessera::comm::shm {

/// One collective on this rank, in memory of one medium. start() announces it and, if it is small,
/// already puts this rank's part where the peers look, without waiting; finish() does the rest. The
/// memory must stay until finish() returns.
class Collective {
 public:
  Collective(Medium& medium, const Descriptor& descriptor)
      : descriptor_(descriptor), medium_(medium) {}
  virtual ~Collective() = default;
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  const Descriptor& descriptor() const { return descriptor_; }
  /// Whether start() does all of this rank's writing at once, given free slots.
  virtual bool starts_at_once(const Channel& channel) const = 0;
  bool has_started() const { return has_started_; }
  void start(Channel& channel);
  void finish(Channel& channel);

  std::chrono::milliseconds timeout{0};

 protected:
  virtual void begin(Channel& channel) = 0;
  virtual void complete(Channel& channel) = 0;

  Descriptor descriptor_;
  Medium& medium_;

 private:
  bool has_started_ = false;
};

struct Bytes {
  uint8_t* data = nullptr;
  size_t size = 0;
};

/// The group, and where the collective's memory lies.
struct Place {
  Channel& channel;
  Medium& medium;
};

using CollectivePtr = std::unique_ptr<Collective>;

// `descriptor` has kind, dtype, reduce and root filled in; the sizes are set here.
CollectivePtr make_all_reduce(const Place& place, Descriptor descriptor, Bytes data,
                              Combine combine);
CollectivePtr make_reduce(const Place& place, Descriptor descriptor, Bytes data, Combine combine);
/// inputs: by destination, all of output.size bytes; lying one after another in memory if
/// `inputs_adjoin`.
CollectivePtr make_reduce_scatter(const Place& place, Descriptor descriptor,
                                  std::vector<Bytes> inputs, bool inputs_adjoin, Bytes output,
                                  Combine combine);
CollectivePtr make_broadcast(const Place& place, Descriptor descriptor, Bytes data);
/// outputs: by source, sizes may differ between ranks.
CollectivePtr make_all_gather(const Place& place, Descriptor descriptor, Bytes input,
                              std::vector<Bytes> outputs);
/// outputs: by source, on the root alone.
CollectivePtr make_gather(const Place& place, Descriptor descriptor, Bytes input,
                          std::vector<Bytes> outputs);
/// inputs: by destination, on the root alone.
CollectivePtr make_scatter(const Place& place, Descriptor descriptor, std::vector<Bytes> inputs,
                           Bytes output);
CollectivePtr make_all_to_all(const Place& place, Descriptor descriptor, std::vector<Bytes> inputs,
                              std::vector<Bytes> outputs);
/// A barrier, monitored or not: the error of a monitored one names all that are missing.
CollectivePtr make_barrier(const Place& place, Descriptor descriptor);

}  // namespace tessera::comm::shm
