#pragma once

namespace tessera::train {

/// The variable by which `tessera train` tells its ranks, whose output is a pipe, of the terminal.
inline constexpr const char* kColumnsVariable = "TESSERA_COLUMNS";

/// Columns of the terminal that this process writes to, itself or through its launcher; 0: none, or
/// not known: under mpirun and srun, unless the variable above tells.
int terminal_columns();

}  // namespace tessera::train
