#include "dtensor/debug.h"

#include <tessera/dtensor.h>
#include <tessera/dtensor/tools.h>
#include <tessera/nn/hooks.h>

#include "base/text.h"
#include "dtensor/part.h"
#include "dtensor/scopes.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iomanip>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <vector>

namespace tessera {

/// What a comm_debug has counted, also from the threads in which backward runs; they keep it.
class dtensor::CommCounts {
 public:
  void count(const char* kind, int64_t bytes) {
    const std::lock_guard lock(mutex);
    for (auto* counts : {&all, &by_module[running_.empty() ? std::string() : running_.back()]}) {
      auto& entry = (*counts)[kind];
      ++entry.collectives;
      entry.bytes += bytes;
    }
  }
  void enter(const std::string& module) {
    const std::lock_guard lock(mutex);
    running_.push_back(module);
  }
  void leave() {
    const std::lock_guard lock(mutex);
    if (!running_.empty()) running_.pop_back();
  }

  std::mutex mutex;  // guards the rest
  comm_debug::Counts all;
  std::map<std::string, comm_debug::Counts> by_module;

 private:
  std::vector<std::string> running_;  // modules whose forward runs
};

class comm_debug::Impl {
 public:
  Impl()
      : counts(std::make_shared<dtensor::CommCounts>()),
        scope_(
            dtensor::open_scope([this](auto& scopes) { scopes.comm_counts.push_back(counts); })) {}
  ~Impl() {
    for (auto& handle : handles_) handle.remove();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void follow(torch::nn::Module& root) {
    follow_one(root, "");
    for (const auto& entry : root.named_modules(/*name_prefix=*/"", /*include_self=*/false))
      follow_one(*entry.value(), entry.key());
  }

  const std::shared_ptr<dtensor::CommCounts> counts;

 private:
  void follow_one(torch::nn::Module& module, const std::string& name) {
    if (!is_hookable(module)) return;
    handles_.push_back(register_forward_pre_hook(
        module,
        [counts = counts, name](torch::nn::Module&, nn::Arguments&) { counts->enter(name); },
        {.prepend = true}));
    handles_.push_back(register_forward_hook(
        module,
        [counts = counts](torch::nn::Module&, nn::Arguments&, nn::Result&) { counts->leave(); },
        {.always_call = true}));
  }

  c10::DebugInfoGuard scope_;
  std::vector<HookHandle> handles_;
};

comm_debug::comm_debug() : impl_(std::make_unique<Impl>()) {}
comm_debug::comm_debug(nn::ModuleRef module) : comm_debug() { impl_->follow(module); }
comm_debug::~comm_debug() = default;

const comm_debug::Counts& comm_debug::counts() const { return impl_->counts->all; }

const std::map<std::string, comm_debug::Counts>& comm_debug::counts_by_module() const {
  return impl_->counts->by_module;
}

int64_t comm_debug::total() const {
  const std::lock_guard lock(impl_->counts->mutex);
  int64_t total = 0;
  for (const auto& [kind, count] : impl_->counts->all) total += count.collectives;
  return total;
}

void comm_debug::reset() {
  const std::lock_guard lock(impl_->counts->mutex);
  impl_->counts->all.clear();
  impl_->counts->by_module.clear();
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
  const std::lock_guard lock(impl_->counts->mutex);
  print("(all)", impl_->counts->all);
  for (const auto& [name, counts] : impl_->counts->by_module)
    print(name.empty() ? "(outside of modules)" : name, counts);
  return out.str();
}

namespace dtensor {

void count_collective(const char* kind, size_t bytes) {
  for (const auto& counts : scopes().comm_counts) counts->count(kind, static_cast<int64_t>(bytes));
}

}  // namespace dtensor
}  // namespace tessera

namespace tessera::dtensor {

void DispatchCounts::add(const c10::OperatorName& name, bool has_rule, bool is_sharded) {
  const std::lock_guard lock(mutex_);
  auto& entry =
      entries_[name.overload_name.empty() ? name.name : name.name + "." + name.overload_name];
  ++entry.calls;
  if (!has_rule) ++entry.without_rule;
  if (is_sharded) ++entry.kept_sharded;
}

void DispatchCounts::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

DispatchLog::DispatchLog()
    : counts_(std::make_shared<DispatchCounts>()),
      scope_(open_scope([this](Scopes& scopes) { scopes.dispatch_counts = counts_; })) {}
DispatchLog::~DispatchLog() = default;

}  // namespace tessera::dtensor

namespace tessera {
namespace {

using Range = std::pair<int64_t, int64_t>;  // from, up to

std::string text_of(const Range& range) { return c10::str(range.first, ":", range.second); }

std::string padded(const std::string& text, size_t width) {
  return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

/// Owners of each block, by its rows and columns.
std::map<std::pair<Range, Range>, std::vector<int>> blocks_of(const DTensor& tensor) {
  std::map<std::pair<Range, Range>, std::vector<int>> blocks;
  for (const auto& shard : tensor.shards()) {
    if (std::find(shard.length.begin(), shard.length.end(), 0) != shard.length.end()) continue;
    const auto range = [&](size_t dim) {
      return Range{shard.offset[dim], shard.offset[dim] + shard.length[dim]};
    };
    const auto rows = tensor.dim() > 1 ? range(0) : Range{0, 1};
    blocks[{rows, range(tensor.dim() > 1 ? 1 : 0)}].push_back(shard.owner);
  }
  return blocks;
}

}  // namespace

std::string visualize_sharding(const at::Tensor& tensor) {
  const auto distributed = DTensor::of(tensor);
  TORCH_CHECK_VALUE(tensor.dim() == 1 || tensor.dim() == 2,
                    "visualize_sharding: expected a tensor of 1 or 2 dimensions, got ",
                    tensor.dim(), "; flatten it, or look at DTensor::shards()");
  const auto blocks = blocks_of(distributed);
  std::set<Range> rows;
  std::set<Range> columns;
  for (const auto& [place, owners] : blocks) {
    rows.insert(place.first);
    columns.insert(place.second);
  }
  const auto cell = [&](const Range& row, const Range& column) -> std::string {
    const auto found = blocks.find({row, column});
    if (found == blocks.end()) return "-";
    std::string text;
    for (const int owner : found->second) text += c10::str(text.empty() ? "" : ",", owner);
    return text;
  };
  size_t width = 6;
  for (const auto& column : columns) width = std::max(width, text_of(column).size());
  for (const auto& [place, owners] : blocks)
    width = std::max(width, cell(place.first, place.second).size());
  width += 2;

  std::ostringstream out;
  out << "ranks of each block, " << tensor.sizes() << ' ' << distributed.placements() << '\n';
  out << padded(tensor.dim() > 1 ? "rows" : "", width);
  for (const auto& column : columns) out << padded(text_of(column), width);
  out << '\n';
  for (const auto& row : rows) {
    out << padded(tensor.dim() > 1 ? text_of(row) : "", width);
    for (const auto& column : columns) out << padded(cell(row, column), width);
    out << '\n';
  }
  return out.str();
}

}  // namespace tessera
