#pragma once

#include "base/crc32c.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// Files of torch.save, made by hand, for tests that spoil them.
namespace tessera::testing {

inline void put(std::string& to, uint64_t number, int bytes) {
  for (int i = 0; i < bytes; ++i) to += static_cast<char>((number >> (8 * i)) & 0xFF);
}

using ZipContents = std::vector<std::pair<std::string, std::string>>;

/// Entries one after the other, with a directory behind them: checksums and places fit.
inline std::string zip_of(const ZipContents& entries) {
  std::string file;
  std::string directory;
  for (const auto& [name, bytes] : entries) {
    const auto local = file.size();
    std::string sizes;
    put(sizes, crc32_of_zip(bytes.data(), bytes.size()), 4);
    put(sizes, bytes.size(), 4);
    put(sizes, bytes.size(), 4);
    put(sizes, name.size(), 2);
    put(sizes, 0, 2);
    file += std::string("PK\x03\x04\0\0\0\0\0\0\0\0\0\0", 14) + sizes + name + bytes;
    directory += std::string("PK\x01\x02\0\0\0\0\0\0\0\0\0\0\0\0", 16) + sizes;
    directory += std::string(10, '\0');
    put(directory, local, 4);
    directory += name;
  }
  const auto place = file.size();
  file += directory + std::string("PK\x05\x06\0\0\0\0", 8);
  put(file, entries.size(), 2);
  put(file, entries.size(), 2);
  put(file, directory.size(), 4);
  put(file, place, 4);
  return file + std::string(2, '\0');
}

// clang-format off
/// Of torch.save({"model": OrderedDict(w=…, v=w.t(), p=Parameter(…), f=… of float8), "epoch": 3, "rate": 0.5,
/// "l": [1, (2, None, True)]}): what Python wrote.
inline constexpr char kPickle[] =
    "\200\002}q\000(X\005\000\000\000modelq\001ccollections\012OrderedDict\012q\002)Rq\003(X"
    "\001\000\000\000wq\004ctorch._utils\012_rebuild_tensor_v2\012q\005((X\007\000\000\000sto"
    "rageq\006ctorch\012FloatStorage\012q\007X\001\000\000\0000q\010X\003\000\000\000cpuq\011"
    "K\006tq\012QK\000K\003K\002\206q\013K\002K\001\206q\014\211h\002)Rq\015tq\016Rq\017X\001"
    "\000\000\000vq\020h\005((h\006h\007h\010h\011K\006tq\021QK\000K\002K\003\206q\022K\001K"
    "\002\206q\023\211h\002)Rq\024tq\025Rq\026X\001\000\000\000pq\027ctorch._utils\012_rebuil"
    "d_parameter\012q\030h\005((h\006h\007X\001\000\000\0001q\031h\011K\002tq\032QK\000K\002"
    "\205q\033K\001\205q\034\211h\002)Rq\035tq\036Rq\037\210h\002)Rq \207q!Rq\"X\001\000\000"
    "\000fq#ctorch._utils\012_rebuild_tensor_v3\012q$((h\006ctorch.storage\012UntypedStorage"
    "\012q%X\001\000\000\0002q&h\011K\001tq'QK\000K\001\205q(K\001\205q)\211h\002)Rq*ctorch"
    "\012float8_e5m2\012q+tq,Rq-uX\005\000\000\000epochq.K\003X\004\000\000\000rateq/G\?\340"
    "\000\000\000\000\000\000X\001\000\000\000lq0]q1(K\001K\002N\210\207q2eu.";
// clang-format on

inline std::string some_pickle() { return {kPickle, sizeof(kPickle) - 1}; }

inline std::string torch_file_of(const std::string& pickle) {
  return zip_of({{"archive/data.pkl", pickle},
                 {"archive/byteorder", "little"},
                 {"archive/data/0", std::string(24, 'w')},
                 {"archive/data/1", std::string(8, 'p')},
                 {"archive/data/2", "f"}});
}

}  // namespace tessera::testing
