#include "dtensor/lost_view.h"

#include <c10/util/Exception.h>

namespace tessera::dtensor {
namespace {

/// Neither count ever falls.
uint32_t writes_to_base(const Part& part) {
  const uint32_t noticed = part.base_version.enabled() ? part.base_version.current_version() : 0;
  return noticed + (part.base_writes ? *part.base_writes : 0);
}

}  // namespace

void mark_lost(const at::Tensor& view, const at::Tensor& base) {
  auto& part = part_of(view);
  part.is_lost_view = true;
  if (!has_part(base)) return;
  auto& source = part_of(base);
  if (source.is_lost_view) {
    part.base_version = source.base_version;
    part.base_writes = source.base_writes;
    part.seen_writes = source.seen_writes;
    return;
  }
  if (!source.writes) source.writes = std::make_shared<uint32_t>(0);
  part.base_writes = source.writes;
  if (!base.is_inference()) part.base_version = base.unsafeGetTensorImpl()->version_counter();
  part.seen_writes = writes_to_base(part);
}

void refuse_stale(const char* caller, const Part& part) {
  TORCH_CHECK(writes_to_base(part) == part.seen_writes, caller,
              ": got a view whose parts had to be moved between ranks, and whose base has been ",
              "written to since, which it does not show; take the view again, or redistribute the ",
              "base to Replicate before taking it");
}

void begin_write(const char* caller, const at::Tensor& tensor) {
  auto& part = part_of(tensor);
  TORCH_CHECK(
      !part.is_lost_view, caller,
      ": the target is a view whose parts had to be moved between ranks, so it has memory ",
      "of its own and what is written into it would not reach its base; write to the base, ",
      "or redistribute the base to Replicate before taking the view");
  if (part.writes) ++*part.writes;
  if (part.before_write) part.before_write();
}

}  // namespace tessera::dtensor
