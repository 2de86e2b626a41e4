#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm {

using Digest = std::array<uint8_t, 32>;

/// FIPS 180-4.
Digest sha256(std::string_view bytes);
/// RFC 2104 over SHA-256.
Digest hmac_sha256(std::string_view secret, std::string_view bytes);
/// Takes as long for equal as for different ones.
bool equal_digests(std::string_view a, std::string_view b);

/// The environment variable with the secret that the ranks of a job share.
inline constexpr const char* kJobSecret = "TESSERA_JOB_SECRET";
inline constexpr size_t kShortestSecret = 16;

// Note [signed values]
// In a store that others can reach every value is followed by a nonce and by a MAC of key, value
// and nonce under the job's secret. A value that somebody else has written, changed or moved to
// another key is an error that names the key. The nonce tells two equal updates apart, by which
// counters are made of compareSet. What can't be prevented: keys that are deleted, older values
// that are written back, a server that does not answer.

/// `store` with signed values. See Note [signed values].
class SignedStore final : public c10d::Store {
 public:
  SignedStore(c10::intrusive_ptr<c10d::Store> store, std::string secret);

  c10::intrusive_ptr<Store> clone() override;
  using Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  using Store::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { store_->wait(keys); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    store_->wait(keys, timeout);
  }
  const std::chrono::milliseconds& getTimeout() const noexcept override {
    return store_->getTimeout();
  }
  void setTimeout(const std::chrono::milliseconds& timeout) override {
    store_->setTimeout(timeout);
  }
  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

 private:
  using Bytes = std::vector<uint8_t>;
  Bytes sign(const std::string& key, const std::string& value) const;
  /// Without nonce and MAC; throws if the MAC is wrong.
  std::string verify(const std::string& key, const Bytes& stored) const;
  /// Replaces the value by what `change` makes of it ("" if there is none), and returns that.
  template <class Change>
  std::string update(const std::string& key, const Change& change);
  Bytes mac_of(const std::string& key, const std::string& value_and_nonce) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string secret_;
};

}  // namespace tessera::comm
