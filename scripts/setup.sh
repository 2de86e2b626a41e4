#!/usr/bin/env bash
# Sets up what the build needs: system packages (apt, when root) and a .venv with libtorch and the formatters.
# Does nothing, quickly, when all of it is there. Arguments: programs that one target alone needs (doxygen); or --tests:
# also what some tests run, and are skipped without. Reads:
#   TESSERA_TORCH     folder of a libtorch to use (scripts/find_torch.sh: what is found by itself)
#   TESSERA_TORCH_VERSION  as 2.14.1: that version, into an environment of its own, .venv-2.14.1
#   TESSERA_PIP_ARGS  further arguments for `pip install torch`,
#                     e.g. --index-url https://download.pytorch.org/whl/cpu for the small CPU wheel
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv${TESSERA_TORCH_VERSION:+-$TESSERA_TORCH_VERSION}
requirement=$(cat requirements.txt)
[[ -z ${TESSERA_TORCH_VERSION:-} ]] || requirement="torch==$TESSERA_TORCH_VERSION"

say() { echo "setup: $*" >&2; }
fail() { say "$@"; exit 1; }

# Sets `torch` to the folder of the libtorch to use if that is not the environment's own.
find_torch() {
    torch=$(scripts/find_torch.sh --quiet) || fail "no libtorch that works (above)"
    if [[ $torch == "$PWD/$environment"/* ]]; then torch=; fi
}

has_header() {
    local folder
    for folder in .deps/*/include /usr/include /usr/local/include "${CONDA_PREFIX:-/usr}/include"; do
        [[ -e $folder/$1 ]] && return
    done
    return 1
}

# Sets `required` and `wanted` to the Debian packages that are missing; arguments are programs named as their packages.
find_missing_packages() {
    required=() wanted=()
    local program
    for program in "$@"; do command -v "$program" >/dev/null || required+=("$program"); done
    command -v g++ >/dev/null || command -v c++ >/dev/null || required+=(g++)
    command -v cmake >/dev/null || required+=(cmake)
    python3 -c 'import ensurepip' 2>/dev/null || required+=(python3-venv)
    has_header CLI/CLI.hpp || required+=(libcli11-dev)
    has_header toml++/toml.h || required+=(libtomlplusplus-dev)
    has_header nlohmann/json.hpp || required+=(nlohmann-json3-dev)
    if [[ ! -e .deps/src/googletest ]]; then
        has_header gtest/gtest.h || required+=(libgtest-dev)
        has_header gmock/gmock.h || required+=(libgmock-dev)
    fi
    command -v ninja >/dev/null || wanted+=(ninja-build)
    command -v ccache >/dev/null || wanted+=(ccache)
    has_header benchmark/benchmark.h || wanted+=(libbenchmark-dev)
}

may_install() { [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; }

update_packages() { apt-get update -qq >&2 || say "apt-get update failed, going on with what it knows"; }

apt_install() {
    say "installing $*"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

install_packages() {
    if may_install; then
        update_packages
        ((${#required[@]} == 0)) || apt_install "${required[@]}" || fail "could not install ${required[*]}"
        ((${#wanted[@]} == 0)) || apt_install "${wanted[@]}" || say "going on without ${wanted[*]}"
        return
    fi
    ((${#wanted[@]} == 0)) || say "builds are faster with these (optional): sudo apt-get install -y ${wanted[*]}"
    ((${#required[@]} == 0)) || fail "these packages are missing; run this line, then try again:" \
        $'\n' " sudo apt-get install -y ${required[*]} ${wanted[*]}" \
        $'\n' "(headers may lie in .deps/include and googletest in .deps/src instead)"
}

# As tests/tools/report_in_browser.py finds it: Ubuntu's chromium-browser is there, but only says that it is a snap.
has_browser() {
    local program
    for program in chromium chromium-browser google-chrome google-chrome-stable; do
        if command -v "$program" >/dev/null && "$program" --version >/dev/null 2>&1; then return; fi
    done
    return 1
}

# Sets `skipped` to the tests that cannot run and `for_tests` to the packages that they need.
find_missing_for_tests() {
    skipped=() for_tests=()
    if ! has_browser; then
        skipped+=("the report's page in a browser")
        if grep -q '^ID=ubuntu' /etc/os-release; then for_tests+=(google-chrome-stable); else for_tests+=(chromium); fi
    fi
    if ! command -v doxygen >/dev/null; then
        skipped+=("the API reference")
        for_tests+=(doxygen)
    fi
    if ! command -v mpiexec >/dev/null || ! command -v mpicxx >/dev/null; then
        skipped+=("programs of MPI")
        for_tests+=(openmpi-bin libopenmpi-dev)
    fi
}

install_for_tests() {
    find_missing_for_tests
    ((${#for_tests[@]} > 0)) || return 0
    if may_install; then
        update_packages
        local package
        for package in "${for_tests[@]}"; do apt_install "$package" || say "could not install $package"; done
        find_missing_for_tests
        ((${#for_tests[@]} > 0)) || return 0
    fi
    say "tests of $(printf '%s, ' "${skipped[@]}" | sed 's/, $//; s/, / and of /') will be skipped; to run them:" \
        "sudo apt-get install -y ${for_tests[*]}"
}

# What is installed beside torch. A CUDA build brings NVRTC along, in the version that goes with it.
further_requirements() {
    if compgen -G "$environment/lib/python*/site-packages/torch/lib/libtorch_cuda.so" >/dev/null; then
        grep -v '^nvidia-' requirements-dev.txt
    else
        cat requirements-dev.txt
    fi
}

install_python_packages() {
    if ! "$environment/bin/python" -c '' 2>/dev/null; then
        say "making $environment"
        python3 -m venv --clear "$environment" || return
    fi
    if [[ -z $torch ]]; then
        say "installing $requirement into $environment"
        # shellcheck disable=SC2086  # several arguments in one variable
        "$environment/bin/python" -m pip install -q ${TESSERA_PIP_ARGS:-} "$requirement" ||
            fail "could not install torch; extra pip arguments go into TESSERA_PIP_ARGS," \
                "the folder of an existing one into TESSERA_TORCH."
    fi
    "$environment/bin/python" -m pip install -q -r <(further_requirements)
}

if [[ ${1:-} == --tests ]]; then
    install_for_tests
    shift
fi
find_torch
find_missing_packages "$@"
stamp=$environment/.tessera-setup-$({ echo "$requirement"; cat requirements-dev.txt; echo "torch=$torch"; } | sha256sum |
    head -c 16)
if [[ -e $stamp ]] && ((${#required[@]} == 0)) && "$environment/bin/python" -c '' 2>/dev/null; then
    exit 0
fi
((${#required[@]} + ${#wanted[@]} == 0)) || install_packages
if install_python_packages; then
    rm -f "$environment"/.tessera-setup-*
    touch "$stamp"
elif [[ -n $torch ]]; then
    say "no clang-format and clang-tidy in $environment: make format and make tidy will not work"
else
    fail "could not install $(paste -sd' ' requirements-dev.txt)"
fi
say "done"
