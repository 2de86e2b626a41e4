#pragma once

#include <c10/core/DeviceType.h>

#include <vector>

namespace tessera::compiler {

/// A piece of generated sources.
struct SourcePiece {
  const char* words;  // that it defines, separated by spaces; whoever says one of them needs it
  const char* text;
};

/// Types and functions of kernels; each may use those before it. For the host they are written
/// without branches and without libm, so that compilers turn loops over them into vector
/// instructions; double takes libm's. A GPU has its own.
const std::vector<SourcePiece>& math_pieces(c10::DeviceType device);
/// Those that a GPU has in the place of the host's.
std::vector<SourcePiece> cuda_pieces();
/// Storage of 8 bits, behind that of 16.
std::vector<SourcePiece> float8_pieces(bool is_host);
/// Those at their end: reductions, see Note [rows].
std::vector<SourcePiece> row_pieces(bool is_host);

}  // namespace tessera::compiler
