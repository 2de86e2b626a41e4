#include "launcher/rank_environment.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace tessera::launcher {
namespace {

constexpr std::string_view kIdentityNames[] = {"TESSERA_RANK",
                                               "TESSERA_WORLD_SIZE",
                                               "TESSERA_LOCAL_RANK",
                                               "TESSERA_LOCAL_WORLD_SIZE",
                                               "TESSERA_STORE",
                                               "TESSERA_RESTART_COUNT",
                                               "TESSERA_STORE_LISTEN_FD",
                                               "TESSERA_STOPPED_TIMEOUT_MS"};

using Variables = std::map<std::string, std::string, std::less<>>;

Variables variables_of(const char* const* environment) {
  Variables variables;
  for (; *environment != nullptr; ++environment) {
    const std::string_view entry = *environment;
    const auto equals = entry.find('=');
    if (equals == std::string_view::npos) continue;
    // getenv finds the first of two equal names, and so do we.
    variables.emplace(entry.substr(0, equals), entry.substr(equals + 1));
  }
  return variables;
}

void set_identity(Variables& variables, const RankIdentity& identity) {
  // All of them go first: inside the rank of an outer run they speak of that run.
  for (const auto name : kIdentityNames) variables.erase(std::string(name));
  variables["TESSERA_RANK"] = std::to_string(identity.rank);
  variables["TESSERA_WORLD_SIZE"] = std::to_string(identity.world_size);
  variables["TESSERA_LOCAL_RANK"] = std::to_string(identity.rank);
  variables["TESSERA_LOCAL_WORLD_SIZE"] = std::to_string(identity.world_size);
  variables["TESSERA_STORE"] = identity.store;
  variables["TESSERA_RESTART_COUNT"] = std::to_string(identity.restart_count);
  variables["TESSERA_STOPPED_TIMEOUT_MS"] = std::to_string(identity.stopped_timeout.count());
  if (identity.listen_fd >= 0) {
    variables["TESSERA_STORE_LISTEN_FD"] = std::to_string(identity.listen_fd);
  }
}

}  // namespace

Setting parse_setting(std::string_view text) {
  const auto equals = text.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    throw std::invalid_argument("expected NAME=VALUE, got '" + std::string(text) + "'");
  }
  Setting setting{std::string(text.substr(0, equals)), std::string(text.substr(equals + 1))};
  if (std::ranges::find(kIdentityNames, setting.name) != std::end(kIdentityNames)) {
    throw std::invalid_argument(setting.name +
                                " is set by tessera run itself, for each rank; leave it out");
  }
  return setting;
}

std::vector<std::string> rank_environment(const char* const* inherited,
                                          const std::vector<Setting>& settings,
                                          const RankIdentity& identity, unsigned cores) {
  Variables variables = variables_of(inherited);
  for (const auto& setting : settings) variables[setting.name] = setting.value;
  set_identity(variables, identity);
  const unsigned share = std::max(1u, cores / static_cast<unsigned>(identity.world_size));
  variables.emplace("OMP_NUM_THREADS", std::to_string(share));

  std::vector<std::string> environment;
  environment.reserve(variables.size());
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  return environment;
}

}  // namespace tessera::launcher
