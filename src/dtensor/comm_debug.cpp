#include <tessera/dtensor/tools.h>
#include <tessera/nn/hooks.h>

#include "base/text.h"
#include "dtensor/comm_count.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <vector>

namespace tessera {

class comm_debug::Impl {
 public:
  Impl() { scopes().push_back(this); }
  ~Impl() {
    for (auto& handle : handles_) handle.remove();
    std::erase(scopes(), this);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void follow(torch::nn::Module& root) {
    follow_one(root, "");
    for (const auto& entry : root.named_modules(/*name_prefix=*/"", /*include_self=*/false))
      follow_one(*entry.value(), entry.key());
  }

  void count(const char* kind, int64_t bytes) {
    for (auto* counts :
         {&counts_, &by_module_[running_.empty() ? std::string() : running_.back()]}) {
      auto& entry = (*counts)[kind];
      ++entry.collectives;
      entry.bytes += bytes;
    }
  }

  /// Those of this thread, the outermost first.
  static std::vector<Impl*>& scopes() {
    thread_local std::vector<Impl*> scopes;
    return scopes;
  }

  Counts counts_;
  std::map<std::string, Counts> by_module_;

 private:
  void follow_one(torch::nn::Module& module, const std::string& name) {
    if (!is_hookable(module)) return;
    handles_.push_back(register_forward_pre_hook(
        module, [this, name](torch::nn::Module&, nn::Arguments&) { running_.push_back(name); },
        {.prepend = true}));
    handles_.push_back(
        register_forward_hook(module,
                              [this](torch::nn::Module&, nn::Arguments&, nn::Result&) {
                                if (!running_.empty()) running_.pop_back();
                              },
                              {.always_call = true}));
  }

  std::vector<std::string> running_;
  std::vector<HookHandle> handles_;
};

comm_debug::comm_debug() : impl_(std::make_unique<Impl>()) {}
comm_debug::comm_debug(nn::ModuleRef module) : comm_debug() { impl_->follow(module); }
comm_debug::~comm_debug() = default;

const comm_debug::Counts& comm_debug::counts() const { return impl_->counts_; }

const std::map<std::string, comm_debug::Counts>& comm_debug::counts_by_module() const {
  return impl_->by_module_;
}

int64_t comm_debug::total() const {
  int64_t total = 0;
  for (const auto& [kind, count] : impl_->counts_) total += count.collectives;
  return total;
}

void comm_debug::reset() {
  impl_->counts_.clear();
  impl_->by_module_.clear();
}

std::string comm_debug::to_string() const {
  std::ostringstream out;
  const auto print = [&](const std::string& name, const Counts& counts) {
    for (const auto& [kind, count] : counts) {
      out << std::left << std::setw(32) << name << std::setw(16) << kind << std::right
          << std::setw(8) << count.collectives << "  "
          << format_bytes(static_cast<size_t>(count.bytes)) << '\n';
    }
  };
  print("(all)", impl_->counts_);
  for (const auto& [name, counts] : impl_->by_module_)
    print(name.empty() ? "(outside of modules)" : name, counts);
  return out.str();
}

namespace dtensor {

void count_collective(const char* kind, size_t bytes) {
  for (auto* scope : comm_debug::Impl::scopes()) scope->count(kind, static_cast<int64_t>(bytes));
}

}  // namespace dtensor
}  // namespace tessera
