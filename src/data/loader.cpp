#include <tessera/data.h>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace tessera::data {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostThreads = 256;
constexpr int64_t kMostPrefetched = 65536;
constexpr std::chrono::hours kLongestTimeout(24 * 365);

void check(const LoaderOptions& options) {
  TORCH_CHECK_VALUE(options.batch_size >= 1, "Loader: expected a batch_size of at least 1, got ",
                    options.batch_size);
  TORCH_CHECK_VALUE(options.threads >= 0 && options.threads <= kMostThreads,
                    "Loader: expected threads from 0 to ", kMostThreads, ", got ", options.threads);
  TORCH_CHECK_VALUE(options.prefetch >= 1 && options.prefetch <= kMostPrefetched,
                    "Loader: expected prefetch from 1 to ", kMostPrefetched, ", got ",
                    options.prefetch, "; threads = 0 reads nothing ahead");
  TORCH_CHECK_VALUE(options.timeout.count() > 0, "Loader: expected a timeout above 0, got ",
                    options.timeout.count(), " ms");
  const auto type = options.device.type();
  const bool is_there =
      options.device.is_cpu() || (c10::impl::hasDeviceGuardImpl(type) &&
                                  c10::impl::VirtualGuardImpl(type).deviceCount() >
                                      (options.device.has_index() ? options.device.index() : 0));
  TORCH_CHECK_VALUE(is_there, "Loader: expected a device that is there, got ", options.device);
}

void check_tensors(const std::vector<at::Tensor>& tensors, int64_t samples) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(
        tensor.defined() && tensor.is_cpu(),
        "Loader: expected tensors on the CPU from the data set's function, got ",
        tensor.defined() ? c10::str("one on ", tensor.device()) : std::string("an undefined one"),
        "; the loader copies them to its device");
    TORCH_CHECK_VALUE(tensor.dim() > 0 && tensor.size(0) == samples, "Loader: expected ", samples,
                      " samples along the first dimension, as many as were asked for, got a tensor "
                      "of ",
                      tensor.sizes());
  }
}

}  // namespace

struct Loader::Impl {
  /// A batch from the moment it is asked of a thread. Its fields but the first two are written
  /// once, before `is_done`.
  struct Order {
    std::vector<int64_t> samples;
    int64_t end = 0;  // the position after it
    bool is_done = false;
    std::vector<at::Tensor> tensors = {};
    std::optional<c10::Event> copied = std::nullopt;  // none on the CPU
    std::exception_ptr problem = nullptr;
  };

  Impl(int64_t samples, Read how, const LoaderOptions& chosen)
      : sampler(samples, chosen.sampler), read(std::move(how)), options(chosen) {
    check(options);
    TORCH_CHECK_VALUE(read, "Loader: expected a function that reads samples, got none");
    if (!options.device.is_cpu()) {
      const c10::impl::VirtualGuardImpl devices(options.device.type());
      if (!options.device.has_index()) options.device = devices.getDevice();
      copies = devices.getStreamFromGlobalPool(options.device);
    }
    try {
      for (int i = 0; i < options.threads; ++i) threads.emplace_back([this] { work(); });
    } catch (...) {  // the system gives no more of them
      end();
      throw;
    }
  }

  ~Impl() { end(); }

  void end() {
    {
      const std::lock_guard lock(mutex);
      is_ending = true;
      waiting.clear();
    }
    changed.notify_all();
    for (auto& thread : threads) thread.join();
  }

  /// Of a thread: orders as they come, until the end.
  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return is_ending || !waiting.empty(); });
      if (is_ending) return;
      const auto order = waiting.front();
      waiting.pop_front();
      lock.unlock();
      fill(*order);
      lock.lock();
      order->is_done = true;
      changed.notify_all();
    }
  }

  void fill(Order& order) const {
    try {
      order.tensors = read(order.samples);
      check_tensors(order.tensors, std::ssize(order.samples));
      if (copies) copy(order);
    } catch (...) {
      order.problem = std::current_exception();
    }
  }

  void copy(Order& order) const {
    const c10::StreamGuard on_copies(*copies);
    for (auto& tensor : order.tensors)
      tensor = tensor.pin_memory().to(options.device, tensor.scalar_type(), /*non_blocking=*/true);
    order.copied.emplace(options.device.type());
    order.copied->record(*copies);
  }

  std::shared_ptr<Order> make_order() {
    auto order = std::make_shared<Order>(Order{.samples = sampler.next(options.batch_size)});
    order->end = sampler.position();
    return order;
  }

  /// Asks threads for what is not asked of them yet.
  void order_ahead() {
    while (std::ssize(ahead) < options.prefetch) {
      ahead.push_back(make_order());
      const std::lock_guard lock(mutex);
      waiting.push_back(ahead.back());
      changed.notify_one();
    }
  }

  std::shared_ptr<Order> take() {
    if (threads.empty()) {
      auto order = make_order();
      const auto begin = Clock::now();
      fill(*order);
      waited += std::chrono::duration<double>(Clock::now() - begin).count();
      return order;
    }
    order_ahead();
    auto order = ahead.front();
    const auto begin = Clock::now();
    std::unique_lock lock(mutex);
    // As nanoseconds the longest of milliseconds would overflow.
    const auto timeout = std::min<std::chrono::milliseconds>(options.timeout, kLongestTimeout);
    const bool is_done = changed.wait_for(lock, timeout, [&] { return order->is_done; });
    lock.unlock();
    waited += std::chrono::duration<double>(Clock::now() - begin).count();
    if (!is_done) start_again();
    TORCH_CHECK(is_done, "Loader::next: expected the ", options.batch_size,
                " samples from position ", position, " on to be read within ",
                options.timeout.count(),
                " ms, but the data set's function has not returned; is its disk or network there? "
                "LoaderOptions::timeout gives it longer");
    ahead.pop_front();
    return order;
  }

  std::vector<at::Tensor> next() {
    const auto order = take();
    if (order->problem) {
      start_again();
      std::rethrow_exception(order->problem);
    }
    position = order->end;
    if (!threads.empty()) order_ahead();
    if (!order->copied) return std::move(order->tensors);
    const c10::impl::VirtualGuardImpl devices(options.device.type());
    const auto current = devices.getStream(options.device);
    order->copied->block(current);
    for (const auto& tensor : order->tensors) tensor.record_stream(current);
    return std::move(order->tensors);
  }

  /// With the batch that next() is to give. What threads are reading is dropped when it is there.
  void start_again() {
    ahead.clear();
    {
      const std::lock_guard lock(mutex);
      waiting.clear();
    }
    sampler.seek(position);
  }

  ShardedSampler sampler;  // ahead of `position` by what has been ordered
  Read read;
  LoaderOptions options;
  std::optional<c10::Stream> copies = std::nullopt;  // none on the CPU
  int64_t position = 0;
  double waited = 0;
  std::deque<std::shared_ptr<Order>> ahead = {};  // in order

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Order>> waiting = {};  // for a thread
  bool is_ending = false;
  std::vector<std::thread> threads = {};
};

Loader::Loader(int64_t samples, Read read, LoaderOptions options)
    : impl_(std::make_unique<Impl>(samples, std::move(read), options)) {}
Loader::~Loader() = default;
Loader::Loader(Loader&& other) noexcept = default;
Loader& Loader::operator=(Loader&& other) noexcept = default;

std::vector<at::Tensor> Loader::next() { return impl_->next(); }

int64_t Loader::position() const { return impl_->position; }

void Loader::seek(int64_t position) {
  impl_->sampler.seek(position);  // throws for one that is none
  impl_->position = position;
  impl_->start_again();
}

int64_t Loader::samples() const { return impl_->sampler.samples(); }
int64_t Loader::epoch() const { return impl_->position / impl_->sampler.samples(); }
double Loader::waited() const { return impl_->waited; }

}  // namespace tessera::data
