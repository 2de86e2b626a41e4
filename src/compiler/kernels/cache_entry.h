#pragma once

#include <string>

namespace tessera::compiler {

/// 32 hexadecimal digits by which different contents differ.
std::string content_hash(const std::string& content);

/// A library in the cache: the shared object with the hash of its bytes behind them, which loaders
/// do not look at. So an entry that a full disk or a crash has cut short is told from a good one.
namespace cache_entry {

/// Adds the hash to a freshly compiled library and keeps it for this user alone, whatever the umask
/// is. False: the file can't be read or written.
bool seal(const std::string& library);
/// Whether the file is there, belongs to this user alone and is as it was when it was sealed.
bool is_sound(const std::string& library);

}  // namespace cache_entry
}  // namespace tessera::compiler
