#pragma once

#include "support/peer.h"
#include "support/temporary_folder.h"

#include <c10/util/StringUtil.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

/// Python programs that run our distributed tensors as ranks, through the library.
namespace tessera::testing {

/// Runs SCRIPT LIBRARY RANK WORLD_SIZE INIT_METHOD ARGUMENTS… on two ranks and gives what rank 0
/// printed; "{folder}" in an argument is one that the ranks share. Failures are the caller's.
inline std::string run_script(const std::string& script, const std::vector<std::string>& arguments,
                              std::chrono::minutes deadline) {
  const TemporaryFolder folder;
  std::string words = c10::str("'script', '", TESSERA_LIBRARY,
                               "', str(rank), str(world_size), 'file://{folder}/store'");
  for (const auto& argument : arguments) words += ", '" + argument + "'";
  const auto text = c10::str(
      "import os, runpy, sys\n", "sys.path.insert(0, os.path.dirname('", script, "'))\n",
      "sys.argv = [word.replace('{folder}', '", folder.path().string(), "') for word in [", words,
      "]]\n", "runpy.run_path('", script, "', run_name='__main__')\n", "outputs = {}\n");
  // Of placements that cost the same PyTorch takes the first of a set: the ranks' must be in one
  // order.
  // CUDA wheels export parts of an older libstdc++, which the library must not find first.
  return run_peers(2, text, {},
                   {.deadline = deadline,
                    .environment = {{"PYTHONHASHSEED", "0"},
                                    {"PYTHONFAULTHANDLER", "1"},
                                    {"LD_PRELOAD", "libstdc++.so.6"}}})[0]
      .output;
}

/// The counts in the last line that begins with `first`: "samples 12 ran 11 …".
inline std::map<std::string, double> counts_in(const std::string& output,
                                               const std::string& first) {
  std::map<std::string, double> counts;
  const auto begin = output.rfind(first + " ");
  if (begin == std::string::npos) return counts;
  std::istringstream words(output.substr(begin));
  std::string name;
  for (double count = 0; words >> name >> count;) counts[name] = count;
  return counts;
}

}  // namespace tessera::testing
