#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera::comm {

using Digest = std::array<uint8_t, 32>;

/// FIPS 180-4.
Digest sha256(std::string_view bytes);
/// RFC 2104 over SHA-256.
Digest hmac_sha256(std::string_view secret, std::string_view bytes);
/// Takes as long for equal as for different ones.
bool equal_digests(std::string_view a, std::string_view b);

}  // namespace tessera::comm
