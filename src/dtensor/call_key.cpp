#include "dtensor/call_key.h"

#include "dtensor/call.h"

#include <bit>
#include <cstring>

namespace tessera::dtensor {
namespace {

/// Tells values of different kinds apart.
enum Tag : uint64_t {
  kNone = 1,
  kPlain,
  kDistributed,
  kInt,
  kBool,
  kDouble,
  kComplex,
  kText,
  kDevice,
  kList,
  kGenerator
};

}  // namespace

void CallKey::add_tensor(const at::Tensor& tensor) {
  const bool is_part = has_part(tensor);
  const auto sizes = tensor.sizes();
  words_.push_back((is_part ? kDistributed : kPlain) |
                   static_cast<uint64_t>(tensor.scalar_type()) << 8 |
                   static_cast<uint64_t>(sizes.size()) << 16);
  if (is_part) words_.push_back(part_of(tensor).spec->id);
  for (const auto size : sizes) words_.push_back(static_cast<uint64_t>(size));
  if (!is_part) {
    words_.push_back(static_cast<uint64_t>(number_in(tensor)));
    has_plain_ = has_plain_ || tensor.numel() != 1 || tensor.requires_grad();
    return;
  }
  for (const auto stride : tensor.strides()) words_.push_back(static_cast<uint64_t>(stride));
}

void CallKey::add_text(const std::string& text) {
  words_.push_back(kText | static_cast<uint64_t>(text.size()) << 8);
  for (size_t begin = 0; begin < text.size(); begin += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + begin, std::min(sizeof word, text.size() - begin));
    words_.push_back(word);
  }
}

void CallKey::add(const c10::IValue& value) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) return add_tensor(value.toTensor());
    words_.push_back(kNone);
  } else if (value.isNone()) {
    words_.push_back(kNone);
  } else if (value.isInt()) {
    words_.insert(words_.end(), {kInt, static_cast<uint64_t>(value.toInt())});
  } else if (value.isBool()) {
    words_.push_back(kBool | static_cast<uint64_t>(value.toBool()) << 8);
  } else if (value.isDouble()) {
    words_.insert(words_.end(), {kDouble, std::bit_cast<uint64_t>(value.toDouble())});
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    words_.insert(words_.end(), {kComplex, std::bit_cast<uint64_t>(number.real()),
                                 std::bit_cast<uint64_t>(number.imag())});
  } else if (value.isString()) {
    add_text(value.toStringRef());
  } else if (value.isDevice()) {
    const auto device = value.toDevice();
    words_.push_back(kDevice | static_cast<uint64_t>(device.type()) << 8 |
                     static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 24);
  } else if (value.isList()) {
    const auto elements = value.toListRef();
    words_.push_back(kList | static_cast<uint64_t>(elements.size()) << 8);
    for (const auto& element : elements) add(element);
  } else if (value.isGenerator()) {
    words_.push_back(kGenerator);  // which one decides over values only
  } else {
    is_complete_ = false;
  }
}

size_t CallKey::hash() const {
  uint64_t hash = 0x9e3779b97f4a7c15ULL;
  for (const auto word : words_) {
    hash = (hash ^ word) * 0xff51afd7ed558ccdULL;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace tessera::dtensor
