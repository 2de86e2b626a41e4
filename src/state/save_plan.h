#pragma once

#include "state/files/stored_index.h"
#include "state/holdings.h"

#include <map>
#include <string>
#include <vector>

/// Who writes what. Every rank makes the same plan of what all ranks told.
namespace tessera::state {

/// What a rank has to save, as text for the others: its holdings without the values.
std::string describe_holdings(const std::string& function, const Holdings& holdings,
                              const std::map<std::string, std::string>& extra,
                              const std::string& optimizer);

/// The file of one rank.
struct FilePlan {
  struct Item {
    std::string tensor;  // its name; of an extra: with its prefix
    Box box;             // of an extra: all of it
  };
  std::vector<Item> items;         // in the order of the file
  std::vector<FileEntry> entries;  // the same as the header has them
  std::string header;              // all bytes before the data
};

struct SavePlan {
  StoredIndex index;  // without checksums
  std::vector<FilePlan> files;
};

/// Each box is written by one of the ranks that hold it, such that all write about the same; see
/// Note [copies] for those that may differ.
/// `descriptions` by rank. Throws a ValueError if what the ranks hold does not fit together.
SavePlan plan_save(const std::string& function, const std::vector<std::string>& descriptions);

}  // namespace tessera::state
