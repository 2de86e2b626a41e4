#include "state/fuzz_readers.h"

#include "base/crc32c.h"
#include "state/files/stored_index.h"
#include "state/files/tensor_file.h"
#include "state/files/torch_file.h"
#include "state/optimizer_text.h"
#include "state/torch_bytes.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

namespace tessera::testing {
namespace {

using namespace state;
using Random = std::mt19937_64;

const FileName kName{"fuzz", "input"};

uint64_t below(Random& random, uint64_t limit) { return random() % limit; }

std::vector<FileEntry> some_entries() {
  return {{.name = "blocks.0.weight[0:3,0:4]", .dtype = c10::ScalarType::Float, .shape = {3, 4}},
          {.name = "\"ü\" \\ n", .dtype = c10::ScalarType::BFloat16, .shape = {5}},
          {.name = "step", .dtype = c10::ScalarType::Long, .shape = {}},
          {.name = "empty", .dtype = c10::ScalarType::Byte, .shape = {0, 3}}};
}

/// A whole file: length, header, data.
std::string some_file() {
  auto entries = some_entries();
  auto bytes = layout_file("fuzz", entries);
  return bytes + std::string(entries.back().end, 'd');
}

/// An index of two files with a tensor cut in four, an alias, an extra and an optimizer.
std::string some_index() {
  StoredIndex index;
  for (size_t rank = 0; rank < 2; ++rank)
    index.files.push_back({rank_file_name(rank, 2), 1000, 200, 0x12345678});
  StoredTensor tensor;
  tensor.name = "w";
  tensor.shape = {4, 6};
  for (int64_t cell = 0; cell < 4; ++cell) {
    tensor.parts.push_back({.file = rank_file_name(static_cast<size_t>(cell % 2), 2),
                            .name = "w" + std::to_string(cell),
                            .position = 200 + static_cast<uint64_t>(cell / 2) * 24,
                            .bytes = 24,
                            .offset = {cell / 2 * 2, cell % 2 * 3},
                            .shape = {2, 3},
                            .checksums = {0xdeadbeef}});
  }
  index.tensors.push_back(tensor);
  index.tensors.push_back(
      {.name = "v", .alias_of = "w", .dtype = tensor.dtype, .shape = tensor.shape, .parts = {}});
  index.extras.resize(2);
  index.extras[1]["step"] = {.file = rank_file_name(1, 2),
                             .name = "extra/step",
                             .position = 300,
                             .bytes = 3,
                             .offset = {},
                             .shape = {},
                             .checksums = {7}};
  index.optimizer = R"({"groups":[{"params":["w"],"options":{"lr":{"double":0.1}}}]})";
  return index_text("fuzz", index);
}

const char* const kOptimizer =
    R"({"kind":"AdamW","groups":[{"params":["w","b"],"options":{"lr":{"double":0.1},"amsgrad":false,)"
    R"("betas":{"tuple":[{"double":0.9},{"double":"inf"}]},"fused":null,"name":"x","seed":7}}]})";

/// Numbers and brackets at which readers stumble.
const char* const kTokens[] = {"-1",
                               "0",
                               "1",
                               "18446744073709551615",
                               "9223372036854775808",
                               "4611686018427387904",
                               "1e308",
                               "0.5",
                               "null",
                               "true",
                               "\"\"",
                               "[]",
                               "{}",
                               "[[[[[[[[[[[[[[[[[[[[",
                               "{\"a\":",
                               "]",
                               "}",
                               ",",
                               "\"",
                               "\\u0000",
                               "\xff",
                               "\"shape\":[",
                               "F64",
                               "\"w\":",
                               "R",
                               "Q",
                               "(t",
                               "h\005",
                               "q\003",
                               "\206",
                               "s",
                               "]",
                               "J\377\377\377\177",
                               "cos\nsystem\n"};

void change_one(std::string& text, Random& random) {
  if (text.empty()) {
    text = "{";
    return;
  }
  const auto place = below(random, text.size());
  const auto length = std::min<uint64_t>(text.size() - place, 1 + below(random, 12));
  switch (below(random, 7)) {
    case 0:
      text[place] = static_cast<char>(text[place] ^ (1 << below(random, 8)));
      break;
    case 1:
      text[place] = static_cast<char>(random());
      break;
    case 2:
      text.erase(place, length);
      break;
    case 3:
      text.insert(place, text.substr(below(random, text.size()), length));
      break;
    case 4:
      text.insert(place, kTokens[below(random, std::size(kTokens))]);
      break;
    case 5: {
      const auto digit = text.find_first_of("0123456789", place);
      if (digit == std::string::npos) break;
      auto end = text.find_first_not_of("0123456789", digit);
      if (end == std::string::npos) end = text.size();
      text.replace(
          digit, end - digit,
          below(random, 2) == 0 ? kTokens[below(random, 7)] : std::to_string(below(random, 40)));
      break;
    }
    default:
      text.resize(place);
      break;
  }
}

void change(std::string& text, Random& random) {
  const auto changes = below(random, 4);
  for (uint64_t i = 0; i <= changes; ++i) change_one(text, random);
}

void expect(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

/// As reading of a tensor would go on.
void check_runs(const Box& from, const Box& to, uint64_t from_bytes, uint64_t to_bytes,
                uint64_t element) {
  for (const auto& run : runs_between(from, to, element)) {
    expect(run.from + run.bytes <= from_bytes, "a run leaves its part");
    expect(run.to + run.bytes <= to_bytes, "a run leaves its destination");
  }
}

void read_file_bytes(const std::string& bytes) {
  const auto length = header_length(kName, bytes.substr(0, kLengthBytes), bytes.size());
  const auto data = bytes.size() - kLengthBytes - length;
  uint64_t end = 0;
  for (const auto& entry : parse_header(kName, bytes.substr(kLengthBytes, length), data)) {
    expect(entry.begin == end && entry.end >= entry.begin && entry.end <= data, "bad offsets");
    end = entry.end;
    const Box all{std::vector<int64_t>(entry.shape.size(), 0), entry.shape};
    if (entry.end > entry.begin)
      check_runs(all, all, entry.end - entry.begin, entry.end - entry.begin,
                 c10::elementSize(entry.dtype));
  }
}

void read_index_text(const std::string& text) {
  const auto index = parse_index(kName, text);
  for (const auto& tensor : index.tensors) {
    const auto element = c10::elementSize(tensor.dtype);
    const Box all{std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape};
    uint64_t bytes = 0;
    for (const auto& part : tensor.parts) {
      expect(part.position + part.bytes <= index.files.at(0).bytes ||
                 part.position + part.bytes <= index.files.back().bytes,
             "a part leaves its file");
      check_runs(box_of(part), all, part.bytes,
                 static_cast<uint64_t>(volume(tensor.shape)) * element, element);
      bytes += part.bytes;
    }
    expect(
        !tensor.alias_of.empty() || bytes == static_cast<uint64_t>(volume(tensor.shape)) * element,
        "parts do not make up their tensor");
  }
  auto entries = some_entries();
  layout_file("fuzz", entries);
  const auto expected = expected_entries(index);
  for (size_t number = 0; number < index.files.size(); ++number) {
    try {
      check_header(kName, index.files[number], expected[number], entries);
    } catch (const c10::ValueError&) {
      continue;
    }
  }
}

void read_optimizer_text(const std::string& text) {
  const auto dict = parse_optimizer(kName, text);
  const auto again = parse_optimizer(kName, optimizer_text("fuzz", dict));
  expect(again.param_groups.size() == dict.param_groups.size(),
         "an optimizer comes back otherwise");
}

void read_torch_bytes(const std::string& bytes) {
  const TorchFile file({kName, bytes.size(), [&](uint64_t position, void* to, size_t count) {
                          expect(position <= bytes.size() && count <= bytes.size() - position,
                                 "read beyond the end");
                          std::memcpy(to, bytes.data() + position, count);
                        }});
  for (const auto& [name, tensor] : file.tensors("model")) {
    const auto& entry = file.entry(tensor.storage);
    expect(entry.position + entry.bytes <= bytes.size(), "a storage leaves the file");
    auto last = static_cast<uint64_t>(tensor.offset);
    uint64_t elements = 1;
    for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
      elements *= static_cast<uint64_t>(tensor.shape[dim]);
      last +=
          static_cast<uint64_t>(tensor.shape[dim] - 1) * static_cast<uint64_t>(tensor.strides[dim]);
    }
    expect(elements == 0 || (last + 1) * c10::elementSize(tensor.dtype) <= entry.bytes,
           "a tensor leaves its storage");
  }
}

/// A pickle in a file that is right otherwise, or the file itself.
std::string changed_torch_file(Random& random) {
  if (below(random, 3) == 0) {
    auto file = torch_file_of(some_pickle());
    change(file, random);
    return file;
  }
  auto pickle = some_pickle();
  change(pickle, random);
  return torch_file_of(pickle);
}

/// With the checksum that the text has, so that the reader goes on.
std::string resealed(std::string text) {
  const auto seal = text.rfind(",\"checksum\":\"");
  if (seal != std::string::npos) text.resize(seal);
  char digits[9];
  std::snprintf(digits, sizeof(digits), "%08x", crc32c(text.data(), text.size()));
  return text + ",\"checksum\":\"" + digits + "\"}\n";
}

}  // namespace

FuzzResult fuzz_readers(uint64_t seed, uint64_t count) {
  FuzzResult result;
  const auto file = some_file();
  const auto index = some_index();
  read_file_bytes(file);
  read_index_text(index);
  read_optimizer_text(kOptimizer);
  read_torch_bytes(torch_file_of(some_pickle()));
  Random random(seed);
  for (uint64_t i = 0; i < count; ++i) {
    const auto kind = below(random, 4);
    std::string input = kind == 0 ? index : kind == 1 ? file : kind == 2 ? kOptimizer : "";
    if (kind == 3)
      input = changed_torch_file(random);
    else
      change(input, random);
    if (kind == 0 && below(random, 8) != 0) input = resealed(std::move(input));
    if (kind == 1 && below(random, 2) == 0 && input.size() >= kLengthBytes) {
      // A length that fits again, so that the header itself is read.
      auto end = input.rfind('}');
      const uint64_t length = end == std::string::npos || end < 8 ? 0 : end + 1 - kLengthBytes;
      for (size_t k = 0; k < kLengthBytes; ++k)
        input[k] = static_cast<char>((length >> (8 * k)) & 0xFF);
    }
    constexpr void (*kReaders[])(const std::string&) = {read_index_text, read_file_bytes,
                                                        read_optimizer_text, read_torch_bytes};
    try {
      kReaders[kind](input);
      ++result.accepted;
    } catch (const c10::ValueError&) {
      ++result.refused;
    } catch (const std::exception& error) {
      result.failure = "input " + std::to_string(i) + ": " + error.what() + "\n" + input;
      return result;
    }
  }
  return result;
}

}  // namespace tessera::testing
