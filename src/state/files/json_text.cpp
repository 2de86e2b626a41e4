#include "state/files/json_text.h"

#include <limits>

namespace tessera::state {
namespace {

constexpr size_t kMaxDepth = 16;
constexpr size_t kMaxDimensions = 64;

/// Builds the value, and stops at what nlohmann would let pass.
class StrictBuilder final : public nlohmann::json_sax<Json> {
 public:
  explicit StrictBuilder(size_t max_values) : max_values_(max_values) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t& /*text*/) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t& /*value*/) override { return fail("binary data"); }
  bool start_object(size_t /*count*/) override { return open(Json::object()); }
  bool start_array(size_t /*count*/) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (open_.back()->contains(name)) return fail("the key '" + name.substr(0, 200) + "' twice");
    key_ = std::move(name);
    return true;
  }
  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    return fail("a mistake at character " + std::to_string(position));
  }

  Json result;
  std::string problem;

 private:
  bool fail(std::string what) {
    problem = std::move(what);
    return false;
  }
  Json* place(Json value) {
    if (open_.empty()) {
      result = std::move(value);
      return &result;
    }
    auto& parent = *open_.back();
    if (parent.is_object()) return &(parent[key_] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }
  bool put(Json value) {
    if (++values_ > max_values_) return fail("more values than any such file has");
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (++values_ > max_values_) return fail("more values than any such file has");
    if (open_.size() == kMaxDepth) return fail("values nested deeper than 16");
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::vector<Json*> open_;
  std::string key_;
  size_t values_ = 0;
  size_t max_values_;
};

const Json& typed_field(const FileName& file, const Json& object, const char* name,
                        std::string_view where, const char* type, bool (*is)(const Json&)) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  file.require(object.is_object() && found != object.end(), "expected '", name, "' of ", where,
               ", got none; the file is damaged or of another kind");
  file.require(is(*found), "expected ", type, " as '", name, "' of ", where, ", got ",
               found->type_name(), "; the file is damaged or of another kind");
  return *found;
}

}  // namespace

Json parse_json(const FileName& file, std::string_view text, size_t max_values) {
  StrictBuilder builder(max_values);
  const bool parsed = Json::sax_parse(text.begin(), text.end(), &builder);
  file.require(parsed, "expected JSON, got ",
               builder.problem.empty() ? "something else" : builder.problem,
               "; the file is damaged or no such file");
  return std::move(builder.result);
}

std::string to_text(const std::string& function, const Json& value) {
  try {
    return value.dump();
  } catch (const Json::type_error&) {
    TORCH_CHECK_VALUE(false, function,
                      ": expected names in UTF-8, got one that is not; rename the parameter, "
                      "buffer or extra");
  }
}

const Json& object_field(const FileName& file, const Json& object, const char* name,
                         std::string_view where) {
  return typed_field(file, object, name, where, "an object",
                     [](const Json& value) { return value.is_object(); });
}

const Json& array_field(const FileName& file, const Json& object, const char* name,
                        std::string_view where) {
  return typed_field(file, object, name, where, "a list",
                     [](const Json& value) { return value.is_array(); });
}

std::string string_field(const FileName& file, const Json& object, const char* name,
                         std::string_view where) {
  return typed_field(file, object, name, where, "text",
                     [](const Json& value) { return value.is_string(); })
      .get<std::string>();
}

uint64_t count_field(const FileName& file, const Json& object, const char* name,
                     std::string_view where) {
  return typed_field(file, object, name, where, "a number from 0",
                     [](const Json& value) { return value.is_number_unsigned(); })
      .get<uint64_t>();
}

std::vector<int64_t> sizes_field(const FileName& file, const Json& object, const char* name,
                                 std::string_view where) {
  const auto& list = array_field(file, object, name, where);
  file.require(list.size() <= kMaxDimensions, "expected at most 64 dimensions in '", name, "' of ",
               where, ", got ", list.size());
  std::vector<int64_t> sizes;
  for (const auto& size : list) {
    const bool fits =
        size.is_number_unsigned() &&
        size.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    file.require(fits, "expected numbers from 0 in '", name, "' of ", where, ", got ",
                 size.is_number() ? size.dump() : size.type_name(), "; the file is damaged");
    sizes.push_back(size.get<int64_t>());
  }
  return sizes;
}

}  // namespace tessera::state
