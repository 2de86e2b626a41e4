#pragma once

#include <tessera/comm.h>

#include "base/environment.h"

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::comm {

/// Where the ranks' store is: "tcp://host:port", "file:///path" or "unix://@name".
struct StoreAddress {
  enum class Kind { Tcp, File, Unix };
  Kind kind = Kind::Tcp;
  std::string host = {};  // Tcp
  uint16_t port = 0;      // Tcp
  std::string path = {};  // File; absolute
  std::string name = {};  // Unix; of a socket that no file stands for
};

/// Throws ValueError naming what is wrong with `init_method` and what is expected.
StoreAddress parse_store_address(const std::string& init_method);

/// "tcp://host:port"; an IPv6 address gets its brackets.
std::string tcp_address(const std::string& host, int64_t port);

/// The first host of a list in Slurm's notation: "node01" of "node[01-04,07],x". Empty for an empty
/// list.
std::string first_slurm_host(const std::string& hosts);

/// Who this process is and where its store is, before it has met the others.
struct Launch {
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank =
      std::nullopt;  // none: join_world counts the lower ranks on the host
  std::optional<int> local_world_size = std::nullopt;  // as the launcher says
  std::string init_method = {};  // "tcp://…", "file:///…" or "unix://@…"; empty: none needed
  std::optional<int> listen_fd = std::nullopt;  // rank 0: a socket that already listens on the port
  bool store_is_served_by_agent = false;        // nobody here serves it, not even rank 0
  bool is_alone = false;          // nobody to meet: a world of one, or the fake backend
  std::string store_prefix = {};  // for all keys; empty: none
  std::string job_secret = {};    // signs what the store holds; empty: not signed
  std::string launcher = "none";  // "options", "tessera run", "torchrun", … for messages
};

/// What `options` leave open comes from the first of: `tessera run`, torchrun, Slurm, Open MPI,
/// MPICH and its kin; nothing anywhere is a world of one. Explicit options win. Throws ValueError
/// for what contradicts itself or is incomplete. See Note [mpirun inside Slurm].
Launch find_launch(const InitOptions& options, const Environment& environment = {});

}  // namespace tessera::comm
