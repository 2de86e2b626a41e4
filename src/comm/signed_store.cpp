#include "comm/signed_store.h"

#include "base/environment.h"
#include "comm/hmac.h"
#include "comm/store_wire.h"

#include <c10/util/Exception.h>

#include <random>

namespace tessera::comm {
namespace {

constexpr size_t kNonce = 16;
constexpr size_t kMac = std::tuple_size_v<Digest>;

std::string make_nonce() {
  static thread_local std::random_device device;
  std::string nonce;
  while (nonce.size() < kNonce) nonce += static_cast<char>(device());
  return nonce;
}

}  // namespace

SignedStore::SignedStore(c10::intrusive_ptr<c10d::Store> store, std::string secret)
    : store_(std::move(store)), secret_(std::move(secret)) {
  TORCH_CHECK_VALUE(secret_.size() >= kShortestSecret, "init: expected at least ", kShortestSecret,
                    " characters in ", kJobSecret, ", got ", secret_.size());
}

c10::intrusive_ptr<c10d::Store> SignedStore::clone() {
  return c10::make_intrusive<SignedStore>(store_->clone(), secret_);
}

SignedStore::Bytes SignedStore::mac_of(const std::string& key,
                                       const std::string& value_and_nonce) const {
  // The length keeps a byte from moving between key and value.
  const auto mac = hmac_sha256(secret_, std::to_string(key.size()) + ":" + key + value_and_nonce);
  return {mac.begin(), mac.end()};
}

SignedStore::Bytes SignedStore::sign(const std::string& key, const std::string& value) const {
  const std::string signed_part = value + make_nonce();
  auto stored = to_bytes(signed_part);
  const auto mac = mac_of(key, signed_part);
  stored.insert(stored.end(), mac.begin(), mac.end());
  return stored;
}

std::string SignedStore::verify(const std::string& key, const Bytes& stored) const {
  const auto all = to_text(stored);
  const bool is_long_enough = all.size() >= kNonce + kMac;
  const auto signed_part = all.substr(0, is_long_enough ? all.size() - kMac : 0);
  TORCH_CHECK_WITH(
      DistStoreError,
      is_long_enough &&
          equal_digests(all.substr(signed_part.size()), to_text(mac_of(key, signed_part))),
      "the value of key '", key,
      "' in the store does not carry the MAC of this job: somebody else ",
      "has written it, or the ranks were started with different values of ", kJobSecret);
  return signed_part.substr(0, signed_part.size() - kNonce);
}

void SignedStore::set(const std::string& key, const Bytes& value) {
  store_->set(key, sign(key, to_text(value)));
}

SignedStore::Bytes SignedStore::get(const std::string& key) {
  return to_bytes(verify(key, store_->get(key)));
}

template <class Change>
std::string SignedStore::update(const std::string& key, const Change& change) {
  while (true) {
    const Bytes old = store_->check({key}) ? store_->get(key) : Bytes();
    const std::string value = change(old.empty() ? std::string() : verify(key, old));
    const Bytes desired = sign(key, value);
    if (store_->compareSet(key, old, desired) == desired) return value;
  }
}

SignedStore::Bytes SignedStore::compareSet(const std::string& key, const Bytes& expected,
                                           const Bytes& desired) {
  while (true) {
    const Bytes old = store_->check({key}) ? store_->get(key) : Bytes();
    if (old.empty() && !expected.empty()) return expected;
    if (!old.empty()) {
      const auto value = to_bytes(verify(key, old));
      if (value != expected) return value;
    }
    const Bytes wanted = sign(key, to_text(desired));
    if (store_->compareSet(key, old, wanted) == wanted) return desired;
  }
}

int64_t SignedStore::add(const std::string& key, int64_t value) {
  int64_t sum = 0;
  update(key, [&](const std::string& old) {
    const auto before = old.empty() ? std::optional<int64_t>(0) : parse_int(old);
    TORCH_CHECK_VALUE(before && !__builtin_add_overflow(*before, value, &sum), "the value of key '",
                      key, "' is no number that can be added to");
    return std::to_string(sum);
  });
  return sum;
}

void SignedStore::append(const std::string& key, const Bytes& value) {
  update(key, [&](const std::string& old) { return old + to_text(value); });
}

std::vector<SignedStore::Bytes> SignedStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<Bytes> values;
  if (store_->hasExtendedApi()) {
    values = store_->multiGet(keys);
  } else {
    for (const auto& key : keys) values.push_back(store_->get(key));
  }
  for (size_t i = 0; i < values.size(); ++i) values[i] = to_bytes(verify(keys.at(i), values[i]));
  return values;
}

void SignedStore::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
  TORCH_CHECK_VALUE(keys.size() == values.size(), "multiSet: expected as many values as keys, got ",
                    keys.size(), " keys and ", values.size(), " values");
  for (size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
}

}  // namespace tessera::comm
