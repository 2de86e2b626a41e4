#!/usr/bin/env bash
# libtorch's headers and libraries lie in the environment's own include and lib.
set -euo pipefail

cmake -S . -B build/conda -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$PREFIX" \
    -DTESSERA_TORCH="$PREFIX" -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_EXAMPLES=OFF
cmake --build build/conda --parallel "${CPU_COUNT:-1}"
cmake --install build/conda --prefix "$PREFIX"
