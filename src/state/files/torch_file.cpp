#include "state/files/torch_file.h"

#include "state/files/tensor_file.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <string_view>

namespace tessera::state {
namespace {

using Kind = PickleValue::Kind;
using c10::ScalarType;

constexpr uint64_t kMaxPickle = 100'000'000;
constexpr const char* kPickleName = "data.pkl";
constexpr const char* kUntyped = "torch.storage.UntypedStorage";
constexpr const char* kRebuild = "torch._utils._rebuild_";

struct NamedDtype {
  const char* name;
  ScalarType dtype;
};
constexpr NamedDtype kStorages[] = {
    {"torch.FloatStorage", ScalarType::Float},
    {"torch.DoubleStorage", ScalarType::Double},
    {"torch.HalfStorage", ScalarType::Half},
    {"torch.BFloat16Storage", ScalarType::BFloat16},
    {"torch.LongStorage", ScalarType::Long},
    {"torch.IntStorage", ScalarType::Int},
    {"torch.ShortStorage", ScalarType::Short},
    {"torch.CharStorage", ScalarType::Char},
    {"torch.ByteStorage", ScalarType::Byte},
    {"torch.BoolStorage", ScalarType::Bool},
    {"torch.ComplexFloatStorage", ScalarType::ComplexFloat},
    {"torch.ComplexDoubleStorage", ScalarType::ComplexDouble},
    {kUntyped, ScalarType::Byte},
};
constexpr NamedDtype kDtypes[] = {
    {"torch.float32", ScalarType::Float},
    {"torch.float64", ScalarType::Double},
    {"torch.float16", ScalarType::Half},
    {"torch.bfloat16", ScalarType::BFloat16},
    {"torch.int64", ScalarType::Long},
    {"torch.int32", ScalarType::Int},
    {"torch.int16", ScalarType::Short},
    {"torch.int8", ScalarType::Char},
    {"torch.uint8", ScalarType::Byte},
    {"torch.uint16", ScalarType::UInt16},
    {"torch.uint32", ScalarType::UInt32},
    {"torch.uint64", ScalarType::UInt64},
    {"torch.bool", ScalarType::Bool},
    {"torch.complex32", ScalarType::ComplexHalf},
    {"torch.complex64", ScalarType::ComplexFloat},
    {"torch.complex128", ScalarType::ComplexDouble},
    {"torch.float8_e5m2", ScalarType::Float8_e5m2},
    {"torch.float8_e4m3fn", ScalarType::Float8_e4m3fn},
    {"torch.float8_e5m2fnuz", ScalarType::Float8_e5m2fnuz},
    {"torch.float8_e4m3fnuz", ScalarType::Float8_e4m3fnuz},
    {"torch.float8_e8m0fnu", ScalarType::Float8_e8m0fnu},
};
constexpr const char* kFunctions[] = {
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
};

/// Null if there is none of this name.
template <size_t N>
const NamedDtype* find(const NamedDtype (&rows)[N], const std::string& name) {
  const auto* found = std::ranges::find(rows, name, &NamedDtype::name);
  return found == std::end(rows) ? nullptr : found;
}

void check_global(const FileName& file, const std::string& name) {
  const bool is_known = std::ranges::find(kFunctions, name) != std::end(kFunctions) ||
                        find(kStorages, name) != nullptr || find(kDtypes, name) != nullptr;
  if (is_known) return;
  if (name == "torch._tensor._rebuild_from_type_v2" || name.starts_with("torch.distributed") ||
      name == "torch._utils._rebuild_wrapper_subclass")
    file.refuse(
        "expected plain tensors, got ", in_quotes(name),
        ", a tensor of a class of its own, such as a DTensor; save what "
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) gives");
  if (name.starts_with(kRebuild))
    file.refuse("expected dense tensors, got ", in_quotes(name),
                "; convert the tensor in Python before saving it");
  file.refuse("expected tensors, dicts, lists, tuples, strings and numbers alone, got ",
              in_quotes(name), "; save model.state_dict() alone");
}

/// Older formats, and other files, by their first bytes.
void check_beginning(const ByteSource& file) {
  const auto first = file.read_string(0, std::min<uint64_t>(file.bytes, 512));
  if (first.starts_with("PK")) return;
  constexpr const char* kWayOut =
      "; write it anew in Python: torch.save(torch.load(file, weights_only=True), file)";
  const bool is_tar = first.size() > 262 && first.compare(257, 5, "ustar") == 0;
  file.name.require(!is_tar && !first.starts_with("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9"),
                    "expected a file of torch.save of PyTorch 1.6 or newer, got the older format",
                    kWayOut);
  file.name.refuse("expected a file of torch.save, a zip file, got one that begins otherwise");
}

uint64_t unsigned_product(uint64_t left, uint64_t right, bool& overflows) {
  uint64_t product = 0;
  overflows |= __builtin_mul_overflow(left, right, &product);
  return product;
}

}  // namespace

TorchFile::TorchFile(ByteSource file) : file_(std::move(file)) {
  check_beginning(file_);
  entries_ = read_zip_directory(file_);
  const std::string* name = nullptr;
  for (const auto& [entry, place] : entries_) {
    if (!entry.ends_with(std::string("/") + kPickleName)) continue;
    file_.name.require(name == nullptr, "expected one data.pkl, got several");
    name = &entry;
  }
  file_.name.require(name != nullptr,
                     "expected a file of torch.save, got a zip file without data.pkl");
  folder_ = name->substr(0, name->size() - std::string(kPickleName).size());
  file_.name.require(entries_.count(folder_ + "constants.pkl") == 0,
                     "expected a file of Python's torch.save, got a TorchScript archive, as C++'s "
                     "torch::save and torch.jit.save write them; read it with torch::load");
  const auto order = entries_.find(folder_ + "byteorder");
  file_.name.require(
      order == entries_.end() ||
          read_zip_entry(file_, order->first, order->second, 1000) == "little",
      "expected the byte order of this machine, little, got another; write the file anew on such a "
      "machine");
  const auto bytes = read_zip_entry(file_, *name, entries_.at(*name), kMaxPickle);
  pickle_ = parse_pickle(file_.name, bytes,
                         [this](const std::string& global) { check_global(file_.name, global); });
}

std::vector<std::string> TorchFile::storages() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_)
    if (name.starts_with(folder_ + "data/")) names.push_back(name);
  return names;
}

std::string TorchFile::keys_of(const PickleValue& dict) const {
  std::string keys;
  for (size_t i = 0; i + 1 < dict.items.size() && i < 40; i += 2) {
    const auto& key = pickle_[dict.items[i]];
    const auto& value = pickle_[dict.items[i + 1]];
    keys += (i == 0 ? "" : ", ") +
            (key.kind == Kind::String ? in_quotes(key.text) : kind_name(key)) + " (" +
            (is_tensor(value) ? "a tensor" : kind_name(value)) + ")";
  }
  return keys.empty() ? "nothing" : keys + (dict.items.size() > 40 ? ", …" : "");
}

const PickleValue& TorchFile::at(const std::string& path) const {
  const auto* value = &pickle_[pickle_.top];
  for (size_t begin = 0; !path.empty() && begin <= path.size();) {
    const auto end = std::min(path.find('/', begin), path.size());
    const auto key = path.substr(begin, end - begin);
    const PickleValue* found = nullptr;
    for (size_t i = 0; value->kind == Kind::Dict && i < value->items.size(); i += 2) {
      const auto& name = pickle_[value->items[i]];
      if (name.kind == Kind::String && name.text == key) found = &pickle_[value->items[i + 1]];
    }
    if (found == nullptr)
      file_.name.refuse("expected a dict with ", in_quotes(key), " at key '", path, "', got ",
                        value->kind == Kind::Dict ? keys_of(*value) : kind_name(*value));
    value = found;
    begin = end + 1;
  }
  return *value;
}

std::vector<std::pair<std::string, TorchTensor>> TorchFile::tensors(const std::string& path) const {
  const auto& dict = at(path);
  const auto where = path.empty() ? std::string() : " at key '" + path + "'";
  file_.name.require(dict.kind == Kind::Dict, "expected a dict of tensors", where, ", got ",
                     is_tensor(dict) ? "a tensor" : kind_name(dict));
  std::vector<std::pair<std::string, TorchTensor>> tensors;
  std::set<std::string_view> names;
  for (size_t i = 0; i < dict.items.size(); i += 2) {
    const auto& key = pickle_[dict.items[i]];
    const auto& value = pickle_[dict.items[i + 1]];
    if (key.kind != Kind::String || !is_tensor(value))
      file_.name.refuse("expected tensors by name alone", where, ", got ", keys_of(dict),
                        "; give the key of the dict that has them, {.key = \"model\"}");
    // One string of the file may be the key of every entry: each is copied once, and not long.
    check_key(key);
    if (!names.insert(key.text).second)
      file_.name.refuse("expected ", in_quotes(key.text), " once in the dict, got it twice");
    tensors.emplace_back(key.text, tensor(value, "tensor " + in_quotes(key.text)));
  }
  return tensors;
}

void TorchFile::check_key(const PickleValue& key) const {
  constexpr size_t kMaxKey = 4096;
  if (key.text.size() > kMaxKey)
    file_.name.refuse("expected names of at most ", kMaxKey, " bytes, got one of ",
                      key.text.size());
}

bool TorchFile::is_tensor(const PickleValue& value) const {
  return value.kind == Kind::Call && value.text.starts_with(kRebuild);
}

TorchTensor TorchFile::tensor(const PickleValue& value, const std::string& what) const {
  const auto* call = &value;
  // A parameter is made of a tensor; not of another parameter.
  if (is_tensor(*call) && call->text.starts_with("torch._utils._rebuild_parameter")) {
    const auto& arguments = pickle_[call->items[0]].items;
    file_.name.require(!arguments.empty(), "expected the value of ", what, ", got none");
    call = &pickle_[arguments[0]];
  }
  file_.name.require(is_tensor(*call) && call->text.starts_with("torch._utils._rebuild_tensor"),
                     "expected ", what, " to be a tensor, got ", kind_name(*call));
  return view(pickle_[call->items[0]], what, call->text.ends_with("_v3"));
}

TorchTensor TorchFile::view(const PickleValue& arguments, const std::string& what,
                            bool has_dtype) const {
  const auto& items = arguments.items;
  file_.name.require(items.size() >= (has_dtype ? 7U : 4U) && items.size() <= 8,
                     "expected storage, offset, sizes and strides of ", what, ", got ",
                     items.size(), " values");
  TorchTensor tensor;
  set_storage(pickle_[items[0]], what, tensor);
  const auto& offset = pickle_[items[1]];
  file_.name.require(offset.kind == Kind::Int && offset.integer >= 0, "expected the offset of ",
                     what, ", got ", kind_name(offset), " of ", offset.integer);
  tensor.offset = offset.integer;
  tensor.shape = sizes(pickle_[items[2]], what);
  tensor.strides = sizes(pickle_[items[3]], what);
  file_.name.require(tensor.shape.size() == tensor.strides.size(), "expected as many strides of ",
                     what, " as sizes, got ", tensor.strides.size(), " and ", tensor.shape.size());
  if (has_dtype) {
    const auto& name = pickle_[items[6]];
    const auto* row = name.kind == Kind::Global ? find(kDtypes, name.text) : nullptr;
    file_.name.require(row != nullptr, "expected the dtype of ", what, ", got ", kind_name(name));
    tensor.dtype = row->dtype;
  }
  const size_t metadata = has_dtype ? 7 : 6;
  if (items.size() > metadata) set_flags(pickle_[items[metadata]], what, tensor);
  check_extent(tensor, what);
  return tensor;
}

void TorchFile::set_storage(const PickleValue& value, const std::string& what,
                            TorchTensor& tensor) const {
  const auto* id = value.kind == Kind::Persistent ? &pickle_[value.items[0]] : nullptr;
  file_.name.require(id != nullptr && id->kind == Kind::Tuple && id->items.size() == 5,
                     "expected the storage of ", what, ", got ", kind_name(value));
  const auto& type = pickle_[id->items[1]];
  const auto& key = pickle_[id->items[2]];
  const auto& count = pickle_[id->items[4]];
  const auto* row = type.kind == Kind::Global ? find(kStorages, type.text) : nullptr;
  file_.name.require(row != nullptr && key.kind == Kind::String && count.kind == Kind::Int,
                     "expected type, key and size of the storage of ", what, ", got ",
                     kind_name(type), ", ", kind_name(key), " and ", kind_name(count));
  tensor.dtype = row->dtype;
  tensor.storage = folder_ + "data/" + key.text;
  const auto found = entries_.find(tensor.storage);
  file_.name.require(found != entries_.end(), "expected the storage of ", what, " as ",
                     in_quotes(tensor.storage), ", got none of this name");
  bool overflows = count.integer < 0;
  const auto expected = unsigned_product(static_cast<uint64_t>(count.integer),
                                         c10::elementSize(row->dtype), overflows);
  file_.name.require(!overflows && expected == found->second.bytes, "expected ", count.integer,
                     " elements of the storage of ", what, " in ", in_quotes(tensor.storage),
                     ", got ", found->second.bytes, " bytes");
}

void TorchFile::set_flags(const PickleValue& metadata, const std::string& what,
                          TorchTensor& tensor) const {
  if (metadata.kind == Kind::None) return;
  file_.name.require(metadata.kind == Kind::Dict, "expected a dict of flags for ", what, ", got ",
                     kind_name(metadata));
  for (size_t i = 0; i < metadata.items.size(); i += 2) {
    const auto& key = pickle_[metadata.items[i]];
    const auto& value = pickle_[metadata.items[i + 1]];
    const bool is_known = key.text == "conj" || key.text == "neg";
    file_.name.require(is_known && value.kind == Kind::Bool, "expected the flags conj and neg of ",
                       what, ", got ", in_quotes(key.text));
    (key.text == "conj" ? tensor.is_conjugate : tensor.is_negative) = value.integer != 0;
  }
  file_.name.require(!tensor.is_conjugate || c10::isComplexType(tensor.dtype),
                     "expected complex numbers in ", what, ", which is conjugate");
}

void TorchFile::check_extent(const TorchTensor& tensor, const std::string& what) const {
  (void)bytes_of(file_.name, tensor.shape, tensor.dtype, what);
  const bool is_empty = std::ranges::find(tensor.shape, 0) != tensor.shape.end();
  bool overflows = false;
  auto elements = static_cast<uint64_t>(tensor.offset) + (is_empty ? 0 : 1);
  for (size_t dim = 0; !is_empty && dim < tensor.shape.size(); ++dim) {
    const auto reach = unsigned_product(static_cast<uint64_t>(tensor.shape[dim]) - 1,
                                        static_cast<uint64_t>(tensor.strides[dim]), overflows);
    overflows |= __builtin_add_overflow(elements, reach, &elements);
  }
  const auto bytes = unsigned_product(elements, c10::elementSize(tensor.dtype), overflows);
  const auto held = entries_.at(tensor.storage).bytes;
  file_.name.require(!overflows && bytes <= held, "expected ", what,
                     " within its storage by sizes, strides and offset, got it beyond the ", held,
                     " bytes of ", in_quotes(tensor.storage));
}

std::vector<int64_t> TorchFile::sizes(const PickleValue& value, const std::string& what) const {
  constexpr size_t kMaxDims = 64;
  file_.name.require(value.kind == Kind::Tuple && value.items.size() <= kMaxDims,
                     "expected a tuple of at most 64 sizes of ", what, ", got ", kind_name(value),
                     " of ", value.items.size());
  std::vector<int64_t> sizes;
  for (const auto item : value.items) {
    const auto& size = pickle_[item];
    file_.name.require(size.kind == Kind::Int && size.integer >= 0, "expected sizes of ", what,
                       ", got ", kind_name(size), " of ", size.integer);
    sizes.push_back(size.integer);
  }
  return sizes;
}

}  // namespace tessera::state
