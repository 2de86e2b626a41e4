#include "report/page.h"

#include "report/html.h"
#include "report/run_folder.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <unordered_map>
#include <vector>

namespace tessera::report {

constexpr std::size_t kMostCurvePoints = 2000;

/// What the page's scripts draw, as page/main.js expects it. Curves are cut down to
/// kMostCurvePoints.
nlohmann::ordered_json page_data(const std::vector<Run>& runs);

namespace {

using PageJson = nlohmann::ordered_json;

/// Digits beyond what a curve can show only make the page larger.
double rounded(double value) {
  char text[32];
  const auto* end =
      std::to_chars(text, text + sizeof text, value, std::chars_format::general, 6).ptr;
  std::from_chars(text, end, value);
  return value;
}

PageJson curve(const Series& series) {
  PageJson steps = PageJson::array();
  PageJson seconds = PageJson::array();
  PageJson values = PageJson::array();
  for (const auto& point : downsample(series, kMostCurvePoints)) {
    steps.push_back(point.step);
    seconds.push_back(rounded(point.seconds));
    values.push_back(rounded(point.value));
  }
  return {{"step", steps}, {"seconds", seconds}, {"value", values}};
}

PageJson curves(const Metrics& metrics) {
  PageJson all = PageJson::object();
  for (const auto& [name, series] : metrics.series) all[name] = curve(series);
  const auto& loss = metrics.of("loss");
  const std::size_t window = smoothing_window(loss.size());
  if (window > 1) all["smoothed_loss"] = curve(smooth(loss, window));
  return all;
}

PageJson summary(const Metrics& metrics) {
  PageJson values = {{"steps", metrics.last_step}, {"seconds", rounded(metrics.seconds)}};
  const auto& loss = metrics.of("loss");
  if (!loss.empty()) {
    values["first_loss"] = rounded(loss.front().value);
    values["last_loss"] = rounded(smooth(loss, smoothing_window(loss.size())).back().value);
    values["smoothing"] = smoothing_window(loss.size());
  }
  if (const auto& checked = metrics.of("val_loss"); !checked.empty()) {
    const auto best = std::ranges::min_element(checked, {}, &Point::value);
    values["best_val_loss"] = rounded(best->value);
    values["best_val_step"] = best->step;
  }
  if (const auto& checked = metrics.of("val_nats_per_byte"); !checked.empty()) {
    const auto best = std::ranges::min_element(checked, {}, &Point::value);
    values["nats_per_byte"] = rounded(best->value);
    values["nats_per_byte_step"] = best->step;
  }
  if (const auto& speed = metrics.of("tokens_per_s"); !speed.empty())
    values["tokens_per_s"] = rounded(median(speed));
  if (const auto& share = metrics.of("comm_share"); !share.empty())
    values["comm_share"] = rounded(median(share));
  if (const auto& utilization = metrics.of("mfu"); !utilization.empty())
    values["mfu"] = rounded(median(utilization));
  if (const auto& memory = metrics.of("memory_bytes"); !memory.empty())
    values["memory_bytes"] = std::ranges::max_element(memory, {}, &Point::value)->value;
  return values;
}

PageJson marks(const Metrics& metrics) {
  PageJson list = PageJson::array();
  for (const auto& mark : metrics.marks) {
    list.push_back({{"kind", mark.kind},
                    {"step", mark.step},
                    {"seconds", rounded(mark.seconds)},
                    {"detail", mark.detail}});
  }
  return list;
}

template <class Value>
std::string text_of(const Value& value) {
  if (value.is_string()) return value.template get<std::string>();
  return value.dump(-1, ' ', false, Value::error_handler_t::replace);
}

/// Pairs, since an object's order of keys is no promise of a script.
PageJson config(const Run& run) {
  PageJson pairs = PageJson::array();
  for (const auto& [key, value] : run.config.items())
    pairs.push_back(PageJson::array({key, text_of(value)}));
  return pairs;
}

PageJson facts(const nlohmann::json& all) {
  PageJson known = PageJson::object();
  for (const char* key : {"version", "started", "command", "device", "hosts"}) {
    const auto found = all.find(key);
    if (found == all.end()) continue;
    if (found->is_array()) {
      PageJson texts = PageJson::array();
      for (const auto& entry : *found) texts.push_back(text_of(entry));
      known[key] = texts;
    } else {
      known[key] = text_of(*found);
    }
  }
  for (const char* key : {"world_size", "parameters"}) {
    if (const auto found = all.find(key); found != all.end() && found->is_number())
      known[key] = found->get<double>();
  }
  const auto dataset = all.find("dataset");
  for (const char* key : {"tokens", "files"}) {
    if (dataset == all.end() || !dataset->is_object()) break;
    if (const auto found = dataset->find(key); found != dataset->end() && found->is_number())
      known[std::string("dataset_") + key] = found->get<double>();
  }
  return known;
}

/// Names and sizes of the mesh's dims; null unless each name has a size.
PageJson mesh(const nlohmann::json& all) {
  const auto found = all.find("mesh");
  if (found == all.end() || !found->is_object()) return nullptr;
  const auto shape = found->find("shape");
  const auto names = found->find("dim_names");
  if (shape == found->end() || !shape->is_array() || shape->empty()) return nullptr;
  const bool has_names =
      names != found->end() && names->is_array() && names->size() == shape->size();
  PageJson dims = PageJson::array();
  for (std::size_t at = 0; at < shape->size(); ++at) {
    const auto& size = (*shape)[at];
    if (!size.is_number_integer() || size.get<double>() < 1 || size.get<double>() > 1e9)
      return nullptr;
    dims.push_back({{"name", has_names ? text_of((*names)[at]) : "dim " + std::to_string(at)},
                    {"size", size.get<std::int64_t>()}});
  }
  return dims;
}

PageJson sharding(const nlohmann::json& all) {
  PageJson rows = PageJson::array();
  const auto found = all.find("sharding");
  if (found == all.end() || !found->is_array()) return rows;
  for (const auto& entry : *found) {
    if (!entry.is_object()) continue;
    PageJson row = PageJson::object();
    for (const char* key : {"name", "shape", "dtype", "placements", "local_shape"})
      row[key] = entry.contains(key) ? text_of(entry[key]) : "";
    const auto bytes = entry.find("bytes_per_rank");
    if (bytes != entry.end() && bytes->is_number()) row["bytes_per_rank"] = bytes->get<double>();
    rows.push_back(std::move(row));
  }
  return rows;
}

/// What each unit cost in a step.
PageJson communication(const nlohmann::json& all) {
  PageJson rows = PageJson::array();
  for (const auto& entry : all) {
    if (!entry.is_object()) continue;
    const auto number = [&](const char* key) {
      const auto found = entry.find(key);
      return found != entry.end() && found->is_number() ? found->get<double>() : 0;
    };
    rows.push_back({{"unit", entry.contains("unit") ? text_of(entry["unit"]) : ""},
                    {"parameters", number("parameters")},
                    {"bytes", number("bytes")},
                    {"seconds", number("seconds")}});
  }
  return rows;
}

/// Texts that occur often, each written once.
class TextTable {
 public:
  std::size_t index(const std::string& text) {
    const auto [found, is_new] = indices_.try_emplace(text, list_.size());
    if (is_new) list_.push_back(text);
    return found->second;
  }
  const PageJson& list() const { return list_; }

 private:
  std::unordered_map<std::string, std::size_t> indices_;
  PageJson list_ = PageJson::array();
};

/// There may be many spans: a list per field, without the fields' names at every span.
PageJson spans(const std::vector<Span>& all, TextTable& texts) {
  PageJson columns = PageJson::object();
  const auto add = [&](const char* field, const auto& value_of) {
    PageJson& column = columns[field] = PageJson::array();
    for (const auto& span : all) column.push_back(value_of(span));
  };
  add("rank", [](const Span& span) { return span.rank; });
  add("thread", [](const Span& span) { return span.thread; });
  add("depth", [](const Span& span) { return span.depth; });
  add("start", [](const Span& span) { return rounded(span.start); });
  add("duration", [](const Span& span) { return rounded(span.duration); });
  add("peers",
      [](const Span& span) { return span.peers.empty() ? PageJson(0) : PageJson(span.peers); });
  add("category", [&](const Span& span) { return texts.index(span.category); });
  add("name", [&](const Span& span) { return texts.index(span.name); });
  add("detail", [&](const Span& span) { return texts.index(span.detail); });
  return columns;
}

PageJson timeline(const Timeline& all) {
  TextTable texts;
  PageJson columns = spans(all.spans, texts);
  PageJson waits = PageJson::array();
  for (const auto& wait : all.waits) {
    waits.push_back({{"rank", wait.rank},
                     {"peer", wait.peer},
                     {"start", rounded(wait.start)},
                     {"duration", rounded(wait.duration)},
                     {"name", wait.name},
                     {"thread", wait.thread},
                     {"depth", wait.depth},
                     {"inferred", wait.is_inferred}});
  }
  PageJson shares = PageJson::array();
  for (const auto& [rank, times] : all.shares) {
    PageJson share = {{"rank", rank}};
    for (const char* category : kCategories)
      share[category] = times.contains(category) ? rounded(std::max(0.0, times.at(category))) : 0;
    shares.push_back(std::move(share));
  }
  return {{"duration", rounded(all.duration)},
          {"spans", std::move(columns)},
          {"texts", texts.list()},
          {"waits", waits},
          {"shares", shares},
          {"left_out", all.left_out}};
}

}  // namespace

nlohmann::ordered_json page_data(const std::vector<Run>& runs) {
  PageJson list = PageJson::array();
  for (const auto& run : runs) {
    PageJson entry = {{"name", run.name},
                      {"folder", run.folder.string()},
                      {"notes", run.notes},
                      {"summary", summary(run.metrics)},
                      {"facts", facts(run.facts)},
                      {"mesh", mesh(run.facts)},
                      {"config", config(run)},
                      {"curves", curves(run.metrics)},
                      {"marks", marks(run.metrics)},
                      {"sharding", sharding(run.facts)},
                      {"communication", communication(run.communication)}};
    if (run.timeline && !run.timeline->spans.empty()) entry["timeline"] = timeline(*run.timeline);
    if (run.program) entry["program"] = *run.program;
    if (run.sample) entry["sample"] = *run.sample;
    list.push_back(std::move(entry));
  }
  return {{"runs", list}};
}

namespace {

std::string title_of(const std::vector<Run>& runs) {
  if (runs.size() == 1) return runs[0].name + " · Tessera";
  return std::to_string(runs.size()) + " runs · Tessera";
}

}  // namespace

std::string make_page(const std::vector<Run>& runs) {
  return write_page({.title = title_of(runs),
                     .command = "tessera report",
                     .sections = {"notes", "summary", "curves", "sample", "timeline", "sharding",
                                  "configuration", "program"},
                     .data = page_data(runs),
                     .script = report_script()});
}

}  // namespace tessera::report
