#pragma once

#include <optional>
#include <string>
#include <utility>

namespace tessera {

/// What moves tensors between ranks.
enum class Backend {
  /// For CPU tensors Shm if all ranks share a host, else Gloo. For CUDA tensors Nccl if every rank
  /// has a device of its own (by UUID), else the same as for CPU tensors. Each group chooses by its
  /// ranks and says so at TORCH_CPP_LOG_LEVEL=INFO.
  Auto,
  Shm,   // ours: ranks of one host, through shared memory
  Gloo,  // libtorch's, over the network; CUDA tensors by way of the host
  Nccl,  // libtorch's, for CUDA tensors alone
  Fake,  // one process stands for any number of ranks: nothing is sent
};

/// One for each kind of tensor, at least one of them, and not Auto.
struct DeviceBackends {
  std::optional<Backend> cpu = std::nullopt;
  std::optional<Backend> cuda = std::nullopt;
  bool operator==(const DeviceBackends&) const = default;
};

/// A Backend for all tensors that it can move, or DeviceBackends. Either may be a string, "gloo" or
/// "cpu:gloo,cuda:nccl", which is read by the function that is given the options.
class BackendOption {
 public:
  BackendOption(Backend backend);                 // NOLINT(google-explicit-constructor)
  BackendOption(const DeviceBackends& backends);  // NOLINT(google-explicit-constructor)
  BackendOption(std::string text)                 // NOLINT(google-explicit-constructor)
      : text_(std::move(text)) {}
  BackendOption(const char* text) : text_(text) {}  // NOLINT(google-explicit-constructor)

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace tessera
