#pragma once

#include <string>

/// Where runs are kept unless --run says so.
namespace tessera::train {

/// Makes a new folder, runs/2026-11-16-153000, with a number behind it if that is taken.
std::string make_run_folder();

/// The newest run under runs/; empty if there is none.
std::string newest_run();

}  // namespace tessera::train
