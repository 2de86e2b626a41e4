#include "adopt/remarks.h"

#include "adopt/module_names.h"

#include <algorithm>
#include <array>

namespace tessera::adopt {
namespace {

constexpr std::array<std::string_view, 6> kBases = {"Module",   "Cloneable",      "AnyModule",
                                                    "AnyValue", "NamedAnyModule", "ModuleHolder"};

constexpr std::size_t kMostNames = 6;  // in one note

bool is_options(std::string_view name) { return name.ends_with("Options"); }

}  // namespace

bool is_class_of_torch(std::string_view name) {
  return std::ranges::find(kBases, name) != kBases.end() ||
         (is_options(name) && module_names().contains(name.substr(
                                  0, name.size() - std::string_view("Options").size())));
}

void Remarks::stays(int line, const std::string& name, const std::string& reason) {
  add(line, false, name, reason);
}

void Remarks::by_hand(int line, const std::string& name, const std::string& reason) {
  add(line, true, name, reason);
}

void Remarks::torchs(int line, const std::string& name, bool is_base) {
  const auto whole = "torch::nn::" + name;
  if (name == "ModuleHolder" && is_base) {
    by_hand(line, whole, "a holder that is written out runs no hooks: use TESSERA_MODULE");
  } else if (std::ranges::find(kBases, name) != kBases.end()) {
    stays(line, whole, "modules of both libraries derive from it and fit into it");
  } else if (is_options(name)) {
    stays(line, whole, "options are torch's, tessera::nn takes them");
  } else {
    by_hand(line, whole, "tessera::nn has no such name");
  }
}

void Remarks::add(int line, bool needs_hand, const std::string& name, const std::string& reason) {
  auto& note = by_reason_.try_emplace(reason, Note{.line = line}).first->second;
  note.needs_hand = needs_hand;
  note.reason = reason;
  ++note.places;
  if (note.names.size() > kMostNames || std::ranges::count(note.names, name) > 0) return;
  note.names.push_back(note.names.size() < kMostNames ? name : "…");
}

std::vector<Note> Remarks::notes() const {
  std::vector<Note> notes;
  for (const auto& [reason, note] : by_reason_) notes.push_back(note);
  std::ranges::stable_sort(notes, {}, &Note::line);
  return notes;
}

}  // namespace tessera::adopt
