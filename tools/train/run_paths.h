#pragma once

#include <string>

/// Where runs are kept unless --run says so.
namespace tessera::train {

/// Makes a new folder, runs/2026-11-16-153000, with a number behind it if that is taken.
std::string make_run_folder();

/// The variable by which `tessera train` tells its ranks that it has made the run's folder for
/// them.
inline constexpr const char* kNewRunVariable = "TESSERA_NEW_RUN";

/// Why no run can be kept at `path`, e.g. "is the root of the file system"; empty: one can, there
/// is one already, or it is no folder.
std::string why_no_run_folder(const std::string& path);

/// Takes a folder away that was made for a run and holds nothing.
void remove_unused_folder(const std::string& path);

/// The newest run under runs/; empty if there is none.
std::string newest_run();

}  // namespace tessera::train
