#include "compiler/record/guards.h"

#include "nn/module_hooks.h"

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>
#include <torch/nn/module.h>
#include <torch/nn/modules.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <typeindex>
#include <unordered_map>
#include <utility>

namespace tessera::compiler {
namespace {

using Bytes = std::span<const std::byte>;

/// How much of an object that derives from it is libtorch's: members of the user's class may lie in
/// the padding behind its last one.
size_t size_of_module_part() {
  struct Probe : torch::nn::Module {
    std::byte first_own{};
  };
  static const size_t kSize = [] {
    const Probe probe;
    return static_cast<size_t>(
        &probe.first_own -
        reinterpret_cast<const std::byte*>(static_cast<const torch::nn::Module*>(&probe)));
  }();
  return kSize;
}

/// An object's bytes before and behind torch::nn::Module's.
std::pair<Bytes, Bytes> without_module_part(Bytes object, const torch::nn::Module& module) {
  if (object.empty()) return {};
  const auto* part = reinterpret_cast<const std::byte*>(&module);
  const auto begin =
      static_cast<size_t>(std::clamp<std::ptrdiff_t>(part - object.data(), 0, std::ssize(object)));
  const auto end = std::min(begin + size_of_module_part(), object.size());
  return {object.first(begin), object.subspan(end)};
}

std::string range_of(size_t begin, size_t size) {
  return size == 1 ? c10::str("byte ", begin) : c10::str("bytes ", begin, " to ", begin + size - 1);
}

/// "BlockImpl" of "net::(anonymous namespace)::BlockImpl".
std::string short_name(const std::string& type) {
  const auto scope = type.substr(0, type.find('<')).rfind("::");
  return scope == std::string::npos ? type : type.substr(scope + 2);
}

}  // namespace

Guards::Object* Guards::add(Object object, const void* key) {
  if (!places_.try_emplace(key, objects_.size()).second) return nullptr;
  object.key = key;
  return &objects_.emplace_back(std::move(object));
}

void Guards::add_part(Object& object, Bytes bytes) {
  if (bytes.empty()) return;
  object.parts.push_back({bytes.data(), snapshot_.size(), bytes.size()});
  snapshot_.insert(snapshot_.end(), bytes.begin(), bytes.end());
}

void Guards::watch_function(Bytes object) {
  if (object.empty()) return;
  auto* added = add({.name = "the function object", .type = "it", .bytes = object}, object.data());
  if (added != nullptr) add_part(*added, object);
}

void Guards::watch_variable(const Watched& variable, size_t number) {
  // Its own key: the user may name one that is a member of the function object, too.
  auto* added = add({.name = variable.name(number), .bytes = variable.bytes()}, &variable);
  if (added == nullptr) return;
  added->variable = &variable;
  add_part(*added, variable.bytes());
}

bool Guards::watch_module(const torch::nn::Module& module, const std::string& path) {
  if (const auto known = places_.find(&module); known != places_.end())
    return !std::exchange(objects_[known->second].is_reached, true);
  auto* added = add({}, &module);
  const auto library = find_library_module(module);
  auto* point = nn::find_hook_point(const_cast<torch::nn::Module&>(module));
  added->type = short_name(module.name());
  added->name = "'" + (path.empty() ? added->type : path) + "'";
  added->module = &module;
  added->dynamic_type = &typeid(module);
  added->is_training = module.is_training();
  added->lifetime = module.weak_from_this();
  if (added->lifetime.expired() && point != nullptr) added->lifetime = point->hooks().lifetime();
  added->has_lifetime = !added->lifetime.expired();
  if (point != nullptr)
    added->bytes = point->object();
  else if (library)
    added->bytes = library->object;
  if (library && library->contents != nullptr) {
    added->contents = library->contents;
    added->expected_contents = library->contents(module);
  }
  const auto [before, behind] = without_module_part(added->bytes, module);
  add_part(*added, before);
  add_part(*added, behind);
  return true;
}

/// As it is at this moment.
void Guards::copy(Object& object) {
  for (const auto& part : object.parts)
    std::memcpy(snapshot_.data() + part.offset, part.at, part.size);
  if (object.module != nullptr) object.is_training = object.module->is_training();
  if (object.contents != nullptr) object.expected_contents = object.contents(*object.module);
}

void Guards::expect(const Guards& others) {
  for (const auto& other : others.objects_) {
    // What has no lifetime may be gone: an argument of another call.
    if (!other.has_lifetime || other.is_gone()) continue;
    const auto [before, behind] = without_module_part(other.bytes, *other.module);
    auto known = other;
    known.parts.clear();
    known.is_reached = false;
    auto* added = add(std::move(known), other.key);
    if (added == nullptr) continue;
    add_part(*added, before);
    add_part(*added, behind);
    copy(*added);
  }
}

/// True if some were not masked before.
bool Guards::mask_changes(Object& object) {
  c10::SmallVector<Part, 2> kept;
  bool is_changed = false;
  for (const auto& part : object.parts) {
    const auto* before = snapshot_.data() + part.offset;
    size_t begin = 0;
    for (size_t i = 0; i <= part.size; ++i) {
      if (i < part.size && part.at[i] == before[i]) continue;
      if (i > begin) kept.push_back({part.at + begin, part.offset + begin, i - begin});
      is_changed = is_changed || i < part.size;
      begin = i + 1;
    }
  }
  object.parts = std::move(kept);
  return is_changed;
}

void Guards::end() {
  std::erase_if(objects_,
                [](const Object& object) { return !object.is_reached || object.is_gone(); });
  places_.clear();
  for (size_t i = 0; i < objects_.size(); ++i) {
    auto& object = objects_[i];
    places_.emplace(object.key, i);
    if (mask_changes(object) && object.variable != nullptr)
      broken_ = "it sets " + object.name +
                ", which is in CompileOptions::watch, and its program would not do that; set it "
                "before the call";
    if (object.module != nullptr) object.is_training = object.module->is_training();
    if (object.contents != nullptr) object.expected_contents = object.contents(*object.module);
  }
}

std::string Guards::change_of(const Object& object) const {
  for (const auto& part : object.parts) {
    const auto* before = snapshot_.data() + part.offset;
    if (std::memcmp(part.at, before, part.size) == 0) continue;
    if (object.variable != nullptr) {
      const auto was = object.variable->show(before), is = object.variable->show(part.at);
      return object.name + (was.empty() ? "" : c10::str(": ", was, ", now ", is));
    }
    const auto first = std::mismatch(part.at, part.at + part.size, before).first - part.at;
    auto last = static_cast<std::ptrdiff_t>(part.size) - 1;
    while (part.at[last] == before[last]) --last;
    const auto offset = static_cast<size_t>(part.at + first - object.bytes.data());
    return c10::str(object.module == nullptr ? "what is captured by value in " : "members of ",
                    object.name, " (", range_of(offset, static_cast<size_t>(last - first + 1)),
                    " of ", object.type, ")");
  }
  return {};
}

std::string Guards::changed() const {
  for (const auto& object : objects_) {
    if (object.is_gone() || object.is_another())
      return "a module it calls: another one is in its place";
    if (auto what = change_of(object); !what.empty()) return what;
    if (object.module == nullptr) continue;
    if (object.module->is_training() != object.is_training)
      return "training mode of " + object.name;
    if (object.contents != nullptr && object.contents(*object.module) != object.expected_contents)
      return "options of " + object.name;
  }
  return {};
}

bool Guards::merge(Guards other) {
  bool is_more = false;
  for (auto& theirs : other.objects_) {
    const auto known = places_.find(theirs.key);
    if (known == places_.end()) {
      const auto* key = theirs.key;
      const auto parts = std::exchange(theirs.parts, {});
      auto* added = add(std::move(theirs), key);
      for (const auto& part : parts) add_part(*added, {part.at, part.size});
      continue;
    }
    // What both watch.
    auto& mine = objects_[known->second];
    c10::SmallVector<Part, 2> kept;
    size_t before = 0, after = 0;
    for (const auto& part : mine.parts) {
      before += part.size;
      for (const auto& their : theirs.parts) {
        const auto* begin = std::max(part.at, their.at);
        const auto* end = std::min(part.at + part.size, their.at + their.size);
        if (begin >= end) continue;
        const auto size = static_cast<size_t>(end - begin);
        kept.push_back({begin, part.offset + static_cast<size_t>(begin - part.at), size});
        after += size;
      }
    }
    mine.parts = std::move(kept);
    is_more = is_more || after < before;
  }
  return is_more;
}

std::vector<std::string> Guards::masked() const {
  std::vector<std::string> lines;
  for (const auto& object : objects_) {
    auto [before, behind] = object.module == nullptr
                                ? std::pair(object.bytes, Bytes())
                                : without_module_part(object.bytes, *object.module);
    size_t count = 0;
    std::vector<std::string> ranges;
    for (const auto& all : {before, behind}) {
      const auto* next = all.data();
      const auto skip_to = [&](const std::byte* begin) {
        if (begin <= next) return;
        const auto size = static_cast<size_t>(begin - next);
        count += size;
        ranges.push_back(range_of(static_cast<size_t>(next - object.bytes.data()), size));
      };
      for (const auto& part : object.parts) {
        if (part.at < all.data() || part.at >= all.data() + all.size()) continue;
        skip_to(part.at);
        next = part.at + part.size;
      }
      skip_to(all.data() + all.size());
    }
    if (count > 0)
      lines.push_back(c10::str(count, count == 1 ? " byte of " : " bytes of ", object.name,
                               " that the step itself changes are not watched (",
                               c10::Join(", ", ranges), " of ", object.type, ")"));
  }
  return lines;
}

// The classes of torch::nn: what their objects are made of, for guards.

namespace library {

using namespace torch::nn;

template <class... M>
struct Classes {};

/// One row per class; a module of any other is known by its training mode alone.
using LibraryClasses =
    Classes<AdaptiveAvgPool1dImpl, AdaptiveAvgPool2dImpl, AdaptiveAvgPool3dImpl,
            AdaptiveLogSoftmaxWithLossImpl, AdaptiveMaxPool1dImpl, AdaptiveMaxPool2dImpl,
            AdaptiveMaxPool3dImpl, AlphaDropoutImpl, AvgPool1dImpl, AvgPool2dImpl, AvgPool3dImpl,
            BCELossImpl, BCEWithLogitsLossImpl, BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl,
            BilinearImpl, CELUImpl, CTCLossImpl, ConstantPad1dImpl, ConstantPad2dImpl,
            ConstantPad3dImpl, Conv1dImpl, Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl,
            ConvTranspose2dImpl, ConvTranspose3dImpl, CosineEmbeddingLossImpl, CosineSimilarityImpl,
            CrossEntropyLossImpl, CrossMapLRN2dImpl, DropoutImpl, Dropout2dImpl, Dropout3dImpl,
            ELUImpl, EmbeddingImpl, EmbeddingBagImpl, FeatureAlphaDropoutImpl, FlattenImpl,
            FoldImpl, FractionalMaxPool2dImpl, FractionalMaxPool3dImpl, FunctionalImpl, GELUImpl,
            GLUImpl, GRUImpl, GRUCellImpl, GroupNormImpl, HardshrinkImpl, HardtanhImpl,
            HingeEmbeddingLossImpl, HuberLossImpl, IdentityImpl, InstanceNorm1dImpl,
            InstanceNorm2dImpl, InstanceNorm3dImpl, KLDivLossImpl, L1LossImpl, LPPool1dImpl,
            LPPool2dImpl, LPPool3dImpl, LSTMImpl, LSTMCellImpl, LayerNormImpl, LeakyReLUImpl,
            LinearImpl, LocalResponseNormImpl, LogSigmoidImpl, LogSoftmaxImpl, MSELossImpl,
            MarginRankingLossImpl, MaxPool1dImpl, MaxPool2dImpl, MaxPool3dImpl, MaxUnpool1dImpl,
            MaxUnpool2dImpl, MaxUnpool3dImpl, MishImpl, ModuleDictImpl, ModuleListImpl,
            MultiLabelMarginLossImpl, MultiLabelSoftMarginLossImpl, MultiMarginLossImpl,
            MultiheadAttentionImpl, NLLLossImpl, PReLUImpl, PairwiseDistanceImpl, ParameterDictImpl,
            ParameterListImpl, PixelShuffleImpl, PixelUnshuffleImpl, PoissonNLLLossImpl, RNNImpl,
            RNNCellImpl, RReLUImpl, ReLUImpl, ReLU6Impl, ReflectionPad1dImpl, ReflectionPad2dImpl,
            ReflectionPad3dImpl, ReplicationPad1dImpl, ReplicationPad2dImpl, ReplicationPad3dImpl,
            SELUImpl, SequentialImpl, SiLUImpl, SigmoidImpl, SmoothL1LossImpl, SoftMarginLossImpl,
            SoftmaxImpl, Softmax2dImpl, SoftminImpl, SoftplusImpl, SoftshrinkImpl, SoftsignImpl,
            TanhImpl, TanhshrinkImpl, ThresholdImpl, TransformerImpl, TransformerDecoderImpl,
            TransformerDecoderLayerImpl, TransformerEncoderImpl, TransformerEncoderLayerImpl,
            TripletMarginLossImpl, TripletMarginWithDistanceLossImpl, UnflattenImpl, UnfoldImpl,
            UpsampleImpl, ZeroPad1dImpl, ZeroPad2dImpl, ZeroPad3dImpl>;

// Options that own memory, which the bytes of the object do not show.

template <class T>
uint64_t hash_of(const std::vector<T>& values) {
  return c10::hash<std::vector<T>>()(values);
}
template <class T>
uint64_t hash_of(const std::optional<std::vector<T>>& values) {
  return values ? hash_of(*values) : 0;
}
inline uint64_t contents_of(const LayerNormImpl& module) {
  return hash_of(module.options.normalized_shape());
}
inline uint64_t contents_of(const AdaptiveLogSoftmaxWithLossImpl& module) {
  return hash_of(module.options.cutoffs());
}
inline uint64_t contents_of(const UnflattenImpl& module) { return hash_of(module.options.sizes()); }
inline uint64_t contents_of(const UpsampleImpl& module) {
  return c10::hash_combine(hash_of(module.options.size()), hash_of(module.options.scale_factor()));
}

struct Row {
  const std::type_info& type;
  std::optional<LibraryModule> (*find)(const torch::nn::Module&);
};

template <class M>
std::optional<LibraryModule> find_as(const torch::nn::Module& module) {
  const auto* found = dynamic_cast<const M*>(&module);
  if (found == nullptr) return std::nullopt;
  LibraryModule known{.object = std::as_bytes(std::span(found, 1))};
  if constexpr (requires { contents_of(*found); }) {
    known.contents = [](const torch::nn::Module& of) -> uint64_t {
      return contents_of(dynamic_cast<const M&>(of));
    };
  }
  return known;
}

template <class... M>
constexpr std::array<Row, sizeof...(M)> rows_of(Classes<M...> /*all*/) {
  return {Row{typeid(M), find_as<M>}...};
}

}  // namespace library

std::optional<LibraryModule> find_library_module(const torch::nn::Module& module) {
  using library::Row;
  static const auto kRows = library::rows_of(library::LibraryClasses());
  static const auto kByType = [] {
    std::unordered_map<std::type_index, const Row*> found;
    for (const auto& row : kRows) found.emplace(row.type, &row);
    return found;
  }();
  if (const auto known = kByType.find(typeid(module)); known != kByType.end())
    return known->second->find(module);
  for (const auto& row : kRows) {  // a class that derives from one of them
    if (auto found = row.find(module)) return found;
  }
  return std::nullopt;
}

}  // namespace tessera::compiler
