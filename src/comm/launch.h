#pragma once

#include <tessera/comm.h>

#include "base/environment.h"

#include <optional>
#include <string>

namespace tessera::comm {

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
