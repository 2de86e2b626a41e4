#!/usr/bin/env bash
# Which libtorch to build with: its folder goes to stdout, a line that says why to stderr (not with --quiet). Prints nothing
# where there is none yet, so that .venv has to get one. In this order:
#   1. TESSERA_TORCH, a folder with include/ and lib/
#   2. the active environment's (VIRTUAL_ENV, CONDA_PREFIX)
#   3. a CUDA build: .venv's, then that of python3
#   4. .venv's
# One that was chosen on purpose (1, 2) and can't be used is an error; others that can't are passed over.
# With TESSERA_TORCH_VERSION=2.14.1 it is that version in an environment of its own, .venv-2.14.1, and no other.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
quiet=${1:-}

say() { [[ $quiet == --quiet ]] || echo "$*" >&2; }

torch_of_python() {
    "$1" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')" \
        2>/dev/null || true
}

torch_version() {
    local header
    for header in torch/headeronly/version.h torch/csrc/api/include/torch/version.h; do
        sed -nE 's/.*define TORCH_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+).*/\2/p' "$1/include/$header" 2>/dev/null || true
    done | head -n 3 | paste -sd.
}

has_cuda() { [[ -e $1/lib/libtorch_cuda.so ]]; }
is_supported_version() { [[ $1 =~ ^2\.1[1-5]\.[0-9]+$ ]]; }
is_supported() { is_supported_version "$(torch_version "$1")"; }

take() {  # folder, why
    local kind="without CUDA"
    if has_cuda "$1"; then kind="for CUDA"; fi
    say "libtorch $(torch_version "$1") $kind, $2: $1"
    echo "$1"
    exit 0
}

take_chosen() {  # folder, where it is from
    is_supported "$1" && take "$1" "of $2"
    local version
    version=$(torch_version "$1")
    if [[ -z $version ]]; then
        echo "$2: expected a folder with include/ and lib/ of libtorch 2.11 to 2.15, found none." >&2
    else
        echo "$2 has torch $version, but Tessera works with 2.11 to 2.15. Install torch==2.13.0 there," \
            "deactivate it (then .venv gets its own), or name another one by TESSERA_TORCH." >&2
    fi
    exit 1
}

take_version() {
    local version=$1 torch=
    if ! is_supported_version "$version"; then
        echo "TESSERA_TORCH_VERSION=$version: expected a version from 2.11 to 2.15 with all its numbers, as 2.13.0." >&2
        exit 1
    elif [[ -n ${TESSERA_TORCH:-} ]]; then
        echo "TESSERA_TORCH_VERSION=$version installs a libtorch of its own, but TESSERA_TORCH=$TESSERA_TORCH names one:" \
            "set one of the two." >&2
        exit 1
    fi
    if [[ -x .venv-$version/bin/python ]]; then torch=$(torch_of_python ".venv-$version/bin/python"); fi
    [[ -n $torch ]] || exit 0
    if [[ $(torch_version "$torch") != "$version" ]]; then
        echo ".venv-$version has torch $(torch_version "$torch"), but TESSERA_TORCH_VERSION=$version." \
            "Remove the folder: set-up makes it again." >&2
        exit 1
    fi
    take "$torch" "of TESSERA_TORCH_VERSION=$version"
}

[[ -z ${TESSERA_TORCH_VERSION:-} ]] || take_version "$TESSERA_TORCH_VERSION"
[[ -z ${TESSERA_TORCH:-} ]] || take_chosen "$TESSERA_TORCH" "TESSERA_TORCH=$TESSERA_TORCH"
for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    if [[ -n $environment && -x $environment/bin/python && ! $environment -ef .venv ]]; then
        torch=$(torch_of_python "$environment/bin/python")
        [[ -z $torch ]] || take_chosen "$torch" "the active environment $environment"
    fi
done
own=
if [[ -x .venv/bin/python ]]; then own=$(torch_of_python .venv/bin/python); fi
if [[ -n $own ]] && is_supported "$own" && has_cuda "$own"; then take "$own" "of .venv"; fi
torch=$(torch_of_python python3)
if [[ -n $torch ]] && has_cuda "$torch"; then
    is_supported "$torch" && take "$torch" "of python3, as it is a CUDA build"
    say "libtorch $(torch_version "$torch") of python3 is passed over: Tessera works with 2.11 to 2.15"
fi
if [[ -n $own ]] && is_supported "$own"; then take "$own" "of .venv"; fi
