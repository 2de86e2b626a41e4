#include "comm/signed_store.h"

#include "base/environment.h"
#include "comm/store_protocol.h"

#include <c10/util/Exception.h>

#include <bit>
#include <cstddef>
#include <random>
#include <string>

namespace tessera::comm {
namespace {

constexpr size_t kBlock = 64;
using State = std::array<uint32_t, 8>;

// The first 32 bits of the fractions of the square and cube roots of the first primes.
constexpr State kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr std::array<uint32_t, kBlock> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t big_endian(std::string_view bytes, size_t at) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(bytes[at + i]);
  return value;
}

void mix(State& state, std::string_view block) {
  std::array<uint32_t, kBlock> words{};
  for (size_t i = 0; i < 16; ++i) words[i] = big_endian(block, 4 * i);
  for (size_t i = 16; i < kBlock; ++i) {
    const uint32_t a = words[i - 15];
    const uint32_t b = words[i - 2];
    words[i] = words[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + words[i - 7] +
               (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < kBlock; ++i) {
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                           ((e & f) ^ (~e & g)) + kRounds[i] + words[i];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const State mixed = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += mixed[i];
}

std::string_view view(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

Digest sha256(std::string_view bytes) {
  State state = kStart;
  const uint64_t bits = uint64_t{bytes.size()} * 8;
  while (bytes.size() >= kBlock) {
    mix(state, bytes.substr(0, kBlock));
    bytes.remove_prefix(kBlock);
  }
  std::string rest(bytes);
  rest += '\x80';
  while (rest.size() % kBlock != kBlock - 8) rest += '\0';
  for (int shift = 56; shift >= 0; shift -= 8) rest += static_cast<char>(bits >> shift);
  for (size_t at = 0; at < rest.size(); at += kBlock)
    mix(state, std::string_view(rest).substr(at, kBlock));
  Digest digest{};
  for (size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(std::string_view secret, std::string_view bytes) {
  std::string key(secret);
  if (key.size() > kBlock) key = view(sha256(secret));
  key.resize(kBlock, '\0');
  std::string inner;
  std::string outer;
  for (const char c : key) {
    inner += static_cast<char>(c ^ 0x36);
    outer += static_cast<char>(c ^ 0x5c);
  }
  inner += bytes;
  const Digest digest = sha256(inner);
  outer += view(digest);
  return sha256(outer);
}

bool equal_digests(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned>(static_cast<uint8_t>(a[i]) ^ static_cast<uint8_t>(b[i]));
  return difference == 0;
}

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
