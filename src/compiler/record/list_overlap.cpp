#include "compiler/record/list_overlap.h"

#include "compiler/record/memory.h"

#include <algorithm>
#include <tuple>

namespace tessera::compiler {
namespace {

struct Span {
  const c10::StorageImpl* storage;
  int64_t begin, end;
  size_t place;  // in its list
  bool is_written;

  bool operator<(const Span& other) const {
    return std::tie(storage, begin) < std::tie(other.storage, other.begin);
  }
};

void add(const at::Tensor& tensor, size_t place, bool is_written, std::vector<Span>& spans) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return;
  const auto [begin, end] = bytes_of(tensor);
  spans.push_back({storage_of(tensor), begin, end, place, is_written});
}

bool any_overlap(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end());
  for (size_t i = 0; i < spans.size(); ++i) {
    for (size_t k = i + 1;
         k < spans.size() && spans[k].storage == spans[i].storage && spans[k].begin < spans[i].end;
         ++k) {
      if (spans[i].place != spans[k].place && (spans[i].is_written || spans[k].is_written))
        return true;
    }
  }
  return false;
}

}  // namespace

bool overlap_in_lists(const torch::jit::Stack& arguments, const std::vector<bool>& is_written) {
  std::vector<Span> spans;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensorList()) continue;
    const auto list = arguments[i].toTensorVector();
    for (size_t place = 0; place < list.size(); ++place)
      add(list[place], place, is_written[i], spans);
  }
  return any_overlap(std::move(spans));
}

bool overlap(const std::vector<at::Tensor>& tensors) {
  std::vector<Span> spans;
  for (size_t place = 0; place < tensors.size(); ++place) add(tensors[place], place, true, spans);
  return any_overlap(std::move(spans));
}

}  // namespace tessera::compiler
