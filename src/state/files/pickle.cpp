#include "state/files/pickle.h"

#include <bit>
#include <cstdio>
#include <unordered_map>

namespace tessera::state {
namespace {

using Kind = PickleValue::Kind;

constexpr size_t kMaxValues = 2'000'000;
constexpr const char* kOrderedDict = "collections.OrderedDict";

/// Runs a pickle's opcodes. Every one makes at most one value and one entry of the stack, so that
/// memory is bounded by the pickle's length.
class PickleMachine {
 public:
  PickleMachine(const FileName& file, std::string_view bytes, const CheckGlobal& check)
      : file_(file), bytes_(bytes), check_(check) {}

  Pickle run() {
    require(byte() == 0x80, "expected a pickle of protocol 2 or newer");
    const auto protocol = byte();
    require(protocol >= 2 && protocol <= 5, "expected a pickle of protocol 2 to 5, got ",
            int{protocol});
    for (auto code = byte(); code != '.'; code = byte()) execute(code);
    require(stack_.size() == 1 && marks_.empty() && at_ == bytes_.size(),
            "expected one value and nothing behind it");
    pickle_.top = stack_.back();
    return std::move(pickle_);
  }

 private:
  template <class... Words>
  void require(bool holds, const Words&... words) const {
    if (!holds) file_.refuse("the pickle is damaged at byte ", at_, ": ", words...);
  }

  void execute(uint8_t code) {
    if (push_constant(code) || use_memo(code) || make_container(code)) return;
    switch (code) {
      case 0x95:  // FRAME
        require(number(8) <= bytes_.size() - at_, "expected a frame within it");
        return;
      case 'c': {  // GLOBAL
        auto module = line();
        return push_global(std::move(module), line());
      }
      case 0x93: {  // STACK_GLOBAL
        const auto name = pop(Kind::String);
        const auto module = pop(Kind::String);
        return push_global(pickle_[module].text, pickle_[name].text);
      }
      case 'R':  // REDUCE
        return call();
      case 'b':  // BUILD: attributes of an OrderedDict, such as versions of modules
        (void)pop(Kind::Dict);
        require(top_kind() == Kind::Dict,
                "expected attributes of a dict, got some of another value");
        return;
      case 'Q': {  // BINPERSID
        const auto id = pop();
        return push({.kind = Kind::Persistent, .text = {}, .items = {id}});
      }
      default: {
        char text[8];
        std::snprintf(text, sizeof(text), "0x%02x", code);
        file_.refuse(
            "expected tensors, dicts, lists, tuples, strings and numbers alone, got opcode ", text,
            " at byte ", at_ - 1, " of the pickle; save model.state_dict() alone");
      }
    }
  }

  bool push_constant(uint8_t code) {
    switch (code) {
      case 'N':
        push({.kind = Kind::None, .text = {}, .items = {}});
        return true;
      case 0x88:
        push_integer(1, Kind::Bool);
        return true;
      case 0x89:
        push_integer(0, Kind::Bool);
        return true;
      case 'K':
        push_integer(static_cast<int64_t>(number(1)));
        return true;
      case 'M':
        push_integer(static_cast<int64_t>(number(2)));
        return true;
      case 'J':
        push_integer(static_cast<int32_t>(number(4)));
        return true;
      case 0x8a:
        push_long();
        return true;
      case 'G':
        push_float();
        return true;
      case 0x8c:
        push_text(number(1));
        return true;
      case 'X':
        push_text(number(4));
        return true;
      case 0x8d:
        push_text(number(8));
        return true;
      default:
        return false;
    }
  }

  bool use_memo(uint8_t code) {
    switch (code) {
      case 'q':
        remember(number(1));
        return true;
      case 'r':
        remember(number(4));
        return true;
      case 0x94:
        remember(memo_.size());
        return true;
      case 'h':
        recall(number(1));
        return true;
      case 'j':
        recall(number(4));
        return true;
      default:
        return false;
    }
  }

  bool make_container(uint8_t code) {
    switch (code) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case ')':
        push({.kind = Kind::Tuple, .text = {}, .items = {}});
        return true;
      case ']':
        push({.kind = Kind::List, .text = {}, .items = {}});
        return true;
      case '}':
        push({.kind = Kind::Dict, .text = {}, .items = {}});
        return true;
      case 't':
        push_tuple(since_mark());
        return true;
      case 0x85:
        push_tuple(last(1));
        return true;
      case 0x86:
        push_tuple(last(2));
        return true;
      case 0x87:
        push_tuple(last(3));
        return true;
      case 'a':
        append(Kind::List, last(1));
        return true;
      case 'e':
        append(Kind::List, since_mark());
        return true;
      case 's':
        append(Kind::Dict, last(2));
        return true;
      case 'u':
        append(Kind::Dict, since_mark());
        return true;
      default:
        return false;
    }
  }

  uint8_t byte() {
    require(at_ < bytes_.size(), "expected more of it");
    return static_cast<uint8_t>(bytes_[at_++]);
  }

  /// Little-endian, as nearly all of them are.
  uint64_t number(size_t count) {
    uint64_t value = 0;
    for (size_t i = 0; i < count; ++i) value |= static_cast<uint64_t>(byte()) << (8 * i);
    return value;
  }

  std::string line() {
    const auto end = bytes_.find('\n', at_);
    require(end != std::string_view::npos, "expected the end of a name");
    auto text = std::string(bytes_.substr(at_, end - at_));
    at_ = end + 1;
    return text;
  }

  void push(PickleValue value) {
    require(pickle_.values.size() < kMaxValues, "expected at most ", kMaxValues, " values");
    stack_.push_back(static_cast<uint32_t>(pickle_.values.size()));
    pickle_.values.push_back(std::move(value));
  }

  void push_integer(int64_t integer, Kind kind = Kind::Int) {
    push({.kind = kind, .integer = integer, .text = {}, .items = {}});
  }

  void push_long() {
    const auto count = byte();
    require(count <= 8, "expected numbers of at most 64 bits, got one of ", int{count}, " bytes");
    auto bits = number(count);
    if (count > 0 && count < 8 && (bits >> (8 * count - 1)) != 0) bits |= ~uint64_t{0} << 8 * count;
    push_integer(static_cast<int64_t>(bits));
  }

  void push_float() {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | byte();
    push({.kind = Kind::Float, .number = std::bit_cast<double>(bits), .text = {}, .items = {}});
  }

  void push_text(uint64_t count) {
    require(count <= bytes_.size() - at_, "expected a string of ", count, " bytes within it");
    push({.kind = Kind::String, .text = std::string(bytes_.substr(at_, count)), .items = {}});
    at_ += count;
  }

  void push_tuple(std::vector<uint32_t> items) {
    push({.kind = Kind::Tuple, .text = {}, .items = std::move(items)});
  }

  void push_global(std::string module, const std::string& name) {
    auto whole = std::move(module) + "." + name;
    check_(whole);
    push({.kind = Kind::Global, .text = std::move(whole), .items = {}});
  }

  /// Of what lies above the last mark; a mark holds back what was pushed before it.
  uint32_t pop() {
    require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "expected a value on its stack");
    const auto value = stack_.back();
    stack_.pop_back();
    return value;
  }
  uint32_t pop(Kind kind) {
    const auto value = pop();
    require(pickle_[value].kind == kind, "expected another kind of value, got ",
            kind_name(pickle_[value]));
    return value;
  }
  Kind top_kind() const {
    require(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "expected a value on its stack");
    return pickle_[stack_.back()].kind;
  }

  std::vector<uint32_t> last(size_t count) {
    std::vector<uint32_t> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }
  std::vector<uint32_t> since_mark() {
    require(!marks_.empty(), "expected a mark on its stack");
    std::vector<uint32_t> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                                stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }

  void append(Kind kind, const std::vector<uint32_t>& items) {
    require(top_kind() == kind, "expected a container to put values into, got another value");
    require(kind != Kind::Dict || items.size() % 2 == 0, "expected keys with values");
    auto& to = pickle_.values[stack_.back()].items;
    to.insert(to.end(), items.begin(), items.end());
  }

  void remember(uint64_t key) {
    (void)top_kind();
    memo_[key] = stack_.back();
  }
  void recall(uint64_t key) {
    const auto found = memo_.find(key);
    require(found != memo_.end(), "expected a value that was remembered");
    require(stack_.size() < kMaxValues, "expected at most ", kMaxValues, " values");
    stack_.push_back(found->second);
  }

  void call() {
    const auto arguments = pop(Kind::Tuple);
    const auto function = pop(Kind::Global);
    if (pickle_[function].text == kOrderedDict) {
      require(pickle_[arguments].items.empty(), "expected an OrderedDict to begin empty");
      return push({.kind = Kind::Dict, .text = {}, .items = {}});
    }
    // The tuple itself: copies of it, call by call, would have no bound.
    push({.kind = Kind::Call, .text = pickle_[function].text, .items = {arguments}});
  }

  const FileName& file_;
  std::string_view bytes_;
  const CheckGlobal& check_;
  size_t at_ = 0;
  Pickle pickle_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;  // how much of the stack lies below
  std::unordered_map<uint64_t, uint32_t> memo_;
};

}  // namespace

Pickle parse_pickle(const FileName& file, std::string_view bytes, const CheckGlobal& check) {
  return PickleMachine(file, bytes, check).run();
}

std::string kind_name(const PickleValue& value) {
  switch (value.kind) {
    case Kind::None:
      return "None";
    case Kind::Bool:
      return "a bool";
    case Kind::Int:
      return "an int";
    case Kind::Float:
      return "a float";
    case Kind::String:
      return "a string";
    case Kind::List:
      return "a list";
    case Kind::Tuple:
      return "a tuple";
    case Kind::Dict:
      return "a dict";
    case Kind::Global:
      return "the name " + in_quotes(value.text);
    case Kind::Call:
      return "the result of " + in_quotes(value.text);
    case Kind::Persistent:
      return "a storage";
  }
  return "";
}

}  // namespace tessera::state
