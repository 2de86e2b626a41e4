#include "dtensor/random.h"

#include "base/capture.h"
#include "comm/call_check.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace tessera::dtensor {
namespace {

std::string state_bytes(at::Generator generator) {
  at::Tensor state;
  {
    const std::lock_guard lock(generator.mutex());
    state = generator.get_state();
  }
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}

void set_state_bytes(at::Generator generator, const std::string& bytes) {
  auto state = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// Who a rank is and where its generator stands.
std::string signature(const std::string& state) {
  const std::pair<size_t, int64_t> values{std::hash<std::string>()(state), getpid()};
  return {reinterpret_cast<const char*>(&values), sizeof values};
}

int64_t process_in(const std::string& signature) {
  int64_t process = 0;
  std::memcpy(&process, signature.data() + sizeof(size_t), sizeof process);
  return process;
}

/// Whether all ranks of the mesh have generators of their own, in the same state.
bool do_agree(const Spec& spec, const std::string& state) {
  const comm::Bookkeeping bookkeeping("a random function of DTensors");
  std::vector<std::string> known{signature(state)};
  for (const auto& group : spec.groups) {
    if (group->getSize() == 1) continue;
    std::string mine;
    for (const auto& entry : known) mine += entry;
    std::vector<std::string> wider;
    for (const auto& bytes : gather_bytes(mine, group)) {
      for (size_t begin = 0; begin < bytes.size(); begin += known[0].size())
        wider.push_back(bytes.substr(begin, known[0].size()));
    }
    known = std::move(wider);
  }
  std::set<int64_t> processes;
  for (const auto& entry : known) {
    if (entry.compare(0, sizeof(size_t), known[0], 0, sizeof(size_t)) != 0) return false;
    if (!processes.insert(process_in(entry)).second) return false;
  }
  return true;
}

at::Generator default_generator(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

/// Ranks that are threads share the default generator: one at a time uses or sets it.
std::mutex& default_generator_mutex() {
  static auto& mutex = *new std::mutex();
  return mutex;
}

bool is_first(const Spec& spec) {
  return std::all_of(spec.coordinate.begin(), spec.coordinate.end(),
                     [](int64_t index) { return index == 0; });
}

}  // namespace

MeshGenerator::MeshGenerator(const Spec& spec, c10::Device device)
    : standard_(default_generator(device)), used_(standard_) {
  capture::tell([](capture::Observer& observer) {
    observer.give_up("it draws random numbers for a distributed tensor");
  });
  if (do_agree(spec, state_bytes(standard_))) return;
  // Read only when all have come: a thread may have seeded the generator just before.
  auto state = state_bytes(standard_);
  for (const auto& group : spec.groups) state = broadcast_bytes(state, 0, group);
  used_ = standard_.clone();
  set_state_bytes(used_, state);
  goes_on_ = is_first(spec);
}

MeshGenerator::~MeshGenerator() {
  if (!goes_on_) return;
  const std::lock_guard lock(default_generator_mutex());
  set_state_bytes(standard_, state_bytes(used_));
}

void MeshGenerator::run_as_default(const std::function<void()>& draw) const {
  const std::lock_guard lock(default_generator_mutex());
  if (used_ == standard_) return draw();
  const auto own = state_bytes(standard_);
  set_state_bytes(standard_, state_bytes(used_));
  const auto restore = c10::make_scope_exit([&] { set_state_bytes(standard_, own); });
  draw();
  set_state_bytes(used_, state_bytes(standard_));
}

void require_one_state(const std::string& caller, const Spec& spec, c10::Device device) {
  TORCH_CHECK_VALUE(do_agree(spec, state_bytes(default_generator(device))), caller,
                    ": this operator draws from the default generator, and expected the random ",
                    "generators in one state on all ranks of ", c10::str(spec.mesh),
                    ", each of its own; call torch::manual_seed with one seed everywhere, or call ",
                    "the operator on to_local()");
}

at::Tensor local_part_of(const at::Tensor& whole, const Spec& spec) {
  auto part = whole;
  const auto box = local_box(whole.sizes(), spec.placements, spec.mesh_shape, spec.coordinate);
  for (size_t dim = 0; dim < box.size(); ++dim) {
    if (box[dim].length != part.size(static_cast<int64_t>(dim)))
      part = part.narrow(static_cast<int64_t>(dim), box[dim].offset, box[dim].length);
  }
  return part;
}

at::Tensor empty_global(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                        const at::TensorOptions& options) {
  return at::empty_strided(sizes, dense_strides_like(sizes, strides), options);
}

at::Tensor draw_part(const Spec& spec, at::Tensor whole,
                     const std::function<void(at::Tensor& whole)>& draw) {
  draw(whole);
  const auto part = local_part_of(whole, spec);
  return part.is_same(whole) ? whole : part.clone();  // the whole's memory is given back
}

}  // namespace tessera::dtensor
