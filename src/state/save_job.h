#pragma once

#include <tessera/serialize.h>

#include "state/collective_section.h"
#include "state/files/folders.h"
#include "state/save_plan.h"

#include <c10/core/Event.h>

#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace tessera::state {

/// One save, in the order of its members.
class SaveJob {
 public:
  /// Takes stock of what the ranks hold and decides who writes what. Collective.
  SaveJob(std::string function, const std::string& dir, const torch::nn::Module& module,
          const torch::optim::Optimizer* optimizer, const Extra& extra, const SaveOptions& options);
  ~SaveJob();

  /// What is written from here on is a copy in host memory; the model may change. An error of one
  /// rank, lack of memory, shows in write(), where all ranks learn of it.
  void copy_to_host();
  /// Who meets from here on: other ranks of equal numbers, for another thread.
  void meet_in(const Group& group) { ranks_ = CollectiveSection(group); }
  const CollectiveSection& ranks() const { return ranks_; }
  const std::filesystem::path& dir() const { return dir_; }

  /// Returns when the checkpoint is in its place. Collective; a peer that fails when it is there
  /// already is a warning of rank 0, and of the others an error.
  void write();

 private:
  std::string take_stock(const torch::nn::Module& module, const torch::optim::Optimizer* optimizer,
                         const Extra& extra);
  /// Copies on the device, so that the values may change; false if it lacks the memory.
  bool take_snapshots();
  void copy_values();
  std::string write_own_file() const;
  void publish(const std::vector<std::string>& checksums);

  std::string function_;
  std::filesystem::path dir_;
  CollectiveSection ranks_;
  int keep_last_;
  Holdings holdings_;
  std::unique_ptr<StagingFolder> folder_;  // on rank 0
  SavePlan plan_;
  std::vector<at::Tensor> values_;  // of this rank's file, in its order
  at::Tensor host_memory_;
  std::vector<c10::Event> copies_;  // one per device, on their way to host memory
  std::exception_ptr copy_error_;
};

}  // namespace tessera::state
