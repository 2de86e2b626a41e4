#include "dtensor/random.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/util/hash.h>
#include <unistd.h>

#include <cstring>
#include <map>
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

/// A rank's generators for meshes whose ranks do not agree, by the id of the mesh's groups.
std::map<std::string, at::Generator>& own_generators() {
  thread_local std::map<std::string, at::Generator> generators;
  return generators;
}

std::string name_of(const Spec& spec, c10::Device device) {
  auto name = device.str();
  for (const auto& group : spec.groups) name += "|" + group->getGroupName();
  return name;
}

at::Generator default_generator(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

at::Generator shared_generator(const Spec& spec, c10::Device device) {
  auto standard = default_generator(device);
  auto state = state_bytes(standard);
  if (do_agree(spec, state)) return standard;
  auto& own = own_generators()[name_of(spec, device)];
  if (own.defined()) return own;
  for (const auto& group : spec.groups) state = broadcast_bytes(state, 0, group);
  own = standard.clone();
  set_state_bytes(own, state);
  return own;
}

at::Tensor part_of_whole(const at::Tensor& whole, const Spec& spec) {
  auto part = whole;
  const auto box = local_box(whole.sizes(), spec.placements, spec.mesh_shape, spec.coordinate);
  for (size_t dim = 0; dim < box.size(); ++dim) {
    if (box[dim].length != part.size(static_cast<int64_t>(dim)))
      part = part.narrow(static_cast<int64_t>(dim), box[dim].offset, box[dim].length);
  }
  return part;
}

at::Tensor draw_part(const Spec& spec, c10::IntArrayRef sizes, const at::TensorOptions& options,
                     const std::function<void(at::Tensor& whole)>& draw) {
  auto whole = at::empty(sizes, options);
  draw(whole);
  const auto part = part_of_whole(whole, spec);
  return part.is_same(whole) ? whole : part.clone();  // the whole's memory is given back
}

}  // namespace tessera::dtensor
