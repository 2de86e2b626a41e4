#include "comm/slurm_hosts.h"

namespace tessera::comm {

std::string first_slurm_host(const std::string& hosts) {
  std::string first;
  bool in_brackets = false;
  bool is_skipping = false;  // the rest of a bracket after its first number
  for (char c : hosts) {
    if (c == '[') {
      in_brackets = true;
    } else if (c == ']') {
      in_brackets = is_skipping = false;
    } else if (in_brackets && (c == ',' || c == '-')) {
      is_skipping = true;
    } else if (c == ',') {
      break;
    } else if (!is_skipping) {
      first += c;
    }
  }
  return first;
}

}  // namespace tessera::comm
