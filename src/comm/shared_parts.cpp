#include "comm/shared_parts.h"

#include <mutex>
#include <unordered_map>

namespace tessera::comm {
namespace {

struct Known {
  std::mutex mutex;
  std::unordered_map<const void*, SharedPart> parts;
};

Known& known() {
  static auto* all = new Known;  // parts may outlive static objects
  return *all;
}

}  // namespace

std::shared_ptr<void> declare_shared_part(const void* address, SharedPart part) {
  const std::lock_guard lock(known().mutex);
  known().parts[address] = std::move(part);
  return {const_cast<void*>(address), [](const void* declared) {
            const std::lock_guard unlisting(known().mutex);
            known().parts.erase(declared);
          }};
}

std::optional<SharedPart> find_shared_part(const void* address) {
  const std::lock_guard lock(known().mutex);
  const auto found = known().parts.find(address);
  return found == known().parts.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace tessera::comm
