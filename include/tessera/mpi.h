#pragma once

#include <tessera/comm.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <mpi.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

/// For programs that have MPI communicators: the same ranks as a world, and as groups. MPI serves
/// to meet; collectives go through Tessera's backends, and no thread of Tessera's calls MPI. Not
/// part of <tessera/tessera.h>, and nothing of the library's: the program brings MPI.
namespace tessera::mpi {
namespace detail {

/// Where rank 0 of a communicator serves the store.
struct Address {
  char host[256] = {};
  uint16_t port = 0;
};

inline void check(const char* function, MPI_Comm comm) {
  int is_initialized = 0, is_finalized = 0;
  MPI_Initialized(&is_initialized);
  MPI_Finalized(&is_finalized);
  TORCH_CHECK_VALUE(is_initialized && !is_finalized, function,
                    ": expected to be called between MPI_Init and MPI_Finalize");
  TORCH_CHECK_VALUE(comm != MPI_COMM_NULL, function, ": expected a communicator, got ",
                    "MPI_COMM_NULL; a rank that is not in the communicator must not call");
}

/// Rank 0's address on all ranks. MPI_Bcast would wait for ever where a rank is missing.
inline Address broadcast(const Address& own, MPI_Comm comm, std::chrono::milliseconds timeout) {
  auto address = std::make_unique<Address>(own);
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibcast(address.get(), sizeof(Address), MPI_BYTE, 0, comm, &request);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  int done = 0;
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) {
    if (std::chrono::steady_clock::now() > deadline) {
      static_cast<void>(address.release());  // MPI may still write there
      C10_THROW_ERROR(DistStoreError,
                      c10::str("mpi::init: waited ", timeout.count() / 1e3,
                               " s for rank 0 of the communicator to say where the "
                               "ranks meet; all ranks of the communicator call it"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return *address;
}

/// A store that rank 0 of the communicator serves, on a port that is free.
inline c10::intrusive_ptr<c10d::Store> meet(MPI_Comm comm, int rank,
                                            std::chrono::milliseconds timeout) {
  // Served until the process ends: others may still be leaving when rank 0 has left.
  static auto& served = *new std::vector<c10::intrusive_ptr<c10d::TCPStore>>();
  c10d::TCPStoreOptions options{.port = 0, .isServer = rank == 0, .waitWorkers = false};
  options.timeout = timeout;
  char name[MPI_MAX_PROCESSOR_NAME] = {};
  int length = 0;
  MPI_Get_processor_name(name, &length);
  const std::string here(name, length);
  Address address;
  if (rank == 0) {
    served.push_back(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
    const char* given = std::getenv("MASTER_ADDR");
    (given != nullptr ? std::string(given) : here).copy(address.host, sizeof(address.host) - 1);
    address.port = served.back()->getPort();
  }
  address = broadcast(address, comm, timeout);
  if (rank == 0) return served.back();
  options.port = address.port;
  try {
    return c10::make_intrusive<c10d::TCPStore>(address.host == here ? "127.0.0.1" : address.host,
                                               options);
  } catch (const c10::Error& error) {
    C10_THROW_ERROR(
        DistNetworkError,
        c10::str("mpi::init: rank ", rank, " could not reach the store of rank 0 at ", address.host,
                 ":", address.port, "; does a firewall stand between? MASTER_ADDR on rank 0 gives ",
                 "another address of its host (", error.what_without_backtrace(), ")"));
  }
}

/// The ranks of the communicator that the world was made of. Null: by tessera::init, of all ranks.
inline MPI_Group& world() {
  static MPI_Group group = MPI_GROUP_NULL;
  return group;
}

}  // namespace detail

/// tessera::init with the ranks of `comm`, in their order, and no settings of a launcher. All of
/// them call it, as a collective of MPI's; blocks at most `timeout` for the meeting and as long
/// again for joining, then tells who is missing.
inline void init(MPI_Comm comm = MPI_COMM_WORLD, InitOptions options = {}) {
  detail::check("mpi::init", comm);
  TORCH_CHECK_VALUE(
      !options.rank && !options.world_size && !options.store && options.init_method.empty(),
      "mpi::init: expected rank, world_size, store and init_method to be left to the communicator");
  TORCH_CHECK(!is_initialized(), "mpi::init: expected no world yet; call shutdown() first");
  int rank = 0, size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  if (size > 1) options.store = detail::meet(comm, rank, options.timeout);
  options.rank = rank;
  options.world_size = size;
  tessera::init(std::move(options));
  MPI_Comm_group(comm, &detail::world());
}

/// World ranks of the communicator's ranks, in their order. Asks nobody.
inline std::vector<int> ranks(MPI_Comm comm) {
  detail::check("mpi::ranks", comm);
  if (detail::world() == MPI_GROUP_NULL) MPI_Comm_group(MPI_COMM_WORLD, &detail::world());
  int size = 0, rank = 0;
  MPI_Group_size(detail::world(), &size);
  MPI_Group_rank(detail::world(), &rank);
  TORCH_CHECK_VALUE(
      size == world_size() && rank == tessera::rank(),
      "mpi::ranks: expected a world of a communicator's ranks, as mpi::init makes it");
  MPI_Group group = MPI_GROUP_NULL;
  MPI_Comm_group(comm, &group);
  MPI_Group_size(group, &size);
  std::vector<int> members(size), found(size);
  std::iota(members.begin(), members.end(), 0);
  MPI_Group_translate_ranks(group, size, members.data(), detail::world(), found.data());
  MPI_Group_free(&group);
  for (int i = 0; i < size; ++i)
    TORCH_CHECK_VALUE(found[i] != MPI_UNDEFINED, "mpi::ranks: rank ", i, " of the communicator is ",
                      "not in the world of ", world_size(), " ranks; expected a part of it");
  return found;
}

/// tessera::new_group of the communicator's ranks. Every rank of `comm` calls it, and no other.
inline Group new_group(MPI_Comm comm, GroupOptions options = {}) {
  return tessera::new_group(ranks(comm), std::move(options));
}

}  // namespace tessera::mpi
