#!/usr/bin/env bash
# Builds and runs the tests that need a GPU, with several ranks on one device: `make test-cuda ARGS="..."`.
#   --has-gpu        no test: fails, after a line that says why, where there is no GPU
#   --filter REGEX   only tests whose <binary>.<Suite>.<Test> matches
#   --mps            under MPS, started and ended here: ranks run at once instead of by turns, but a rank that faults or
#                    is killed takes those of all tests with it
#   --sanitize       under compute-sanitizer (memcheck, stream-ordered memory); without --filter the engines' tests
# Reads:
#   JOBS_CUDA        test binaries that run side by side (one per four cores, as they start up to four ranks)
#   JOBS             compilers that run at once (scripts/jobs.sh)
#   TESSERA_TORCH    the libtorch to build with (scripts/find_torch.sh: what is found by itself)
# Leaves JUnit files and logs in build/cuda/test-cuda. Succeeds where there is no GPU, after a line that says so.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

results=build/cuda/test-cuda
filter=
sanitize=
has_gpu=
mps=
while (($# > 0)); do
    case $1 in
        --filter) filter=${2:?--filter: expected a regular expression} && shift 2 ;;
        --has-gpu) has_gpu=1 && shift ;;
        --mps) mps=1 && shift ;;
        --sanitize) sanitize=1 && shift ;;
        *) echo "test-cuda: expected --filter REGEX, --mps or --sanitize, got '$1'" >&2 && exit 2 ;;
    esac
done

skip() { echo "no GPU here: $*; GPU tests skipped" && exit "${has_gpu:-0}"; }

find_gpu() {
    compgen -G '/dev/nvidia[0-9]*' >/dev/null || [[ -e /dev/dxg ]] || skip "no NVIDIA device"
    torch=$(scripts/find_torch.sh --quiet)
    [[ -e $torch/lib/libtorch_cuda.so ]] || skip "${torch:-no libtorch found, which} is no CUDA build of libtorch"
}

build() {
    local generator=()
    if [[ ! -e build/cuda/CMakeCache.txt ]] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
    scripts/find_torch.sh >/dev/null # says which one
    cmake --preset cuda "${generator[@]}" -DTESSERA_TORCH="$torch" >/dev/null
    cmake --build build/cuda --parallel "${JOBS:-$(scripts/jobs.sh)}" --target cuda_tests
}

start_mps() {
    mps_folder=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY=$mps_folder/pipe CUDA_MPS_LOG_DIRECTORY=$mps_folder/log
    mkdir "$mps_folder/pipe" "$mps_folder/log"
    trap end_mps EXIT
    if command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d </dev/null >/dev/null 2>&1; then
        echo "under MPS"
    else
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
        echo "MPS does not start here: without it"
    fi
}

end_mps() {
    if [[ -n ${CUDA_MPS_PIPE_DIRECTORY:-} ]]; then
        echo quit | timeout 30 nvidia-cuda-mps-control >/dev/null 2>&1 || true
    fi
    rm -rf "$mps_folder"
}

find_sanitizer() {
    local found
    for found in "$(command -v compute-sanitizer || true)" /usr/local/cuda/bin/compute-sanitizer; do
        if [[ -x $found ]]; then
            runner=("$found" --tool memcheck --target-processes all --track-stream-ordered-races all --error-exitcode 99)
            export PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync
            return
        fi
    done
    echo "test-cuda --sanitize: expected compute-sanitizer of the CUDA toolkit on PATH or in /usr/local/cuda/bin" >&2
    exit 2
}

# The GPU tests of a binary that were asked for, as a filter of gtest; nothing if there are none.
chosen_tests() { # binary, pattern
    "build/cuda/bin/tests/$1" --gtest_list_tests --gtest_filter="$2" |
        awk -v binary="$1" '/^[^ ].*\.( |$)/ { suite = $1 } /^  / { print binary "." suite $1 }' |
        { grep -E -- "${filter:-.}" || true; } | sed "s/^$1\.//" | paste -sd:
}

run_binary() { # binary, pattern
    local tests status=0
    tests=$(chosen_tests "$1" "$2") || { echo "$1: its tests can't be listed" && echo 1 >"$results/$1.status" && return; }
    [[ -n $tests ]] || return 0
    # Ranks stay for the next test: to start one takes seconds.
    TESSERA_REUSE_RANKS=1 timeout 1800 "${runner[@]}" "build/cuda/bin/tests/$1" --gtest_filter="$tests" --gtest_color=no \
        --gtest_output="xml:$results/$1.xml" >"$results/$1.log" 2>&1 || status=$?
    if grep -q 'ERROR SUMMARY: [1-9]' "$results/$1.log"; then status=99; fi
    echo "$status" >"$results/$1.status"
    echo "$1: done"
}

find_gpu
[[ -z $has_gpu ]] || exit 0
build
rm -rf "$results"
mkdir -p "$results"
runner=()
if [[ -n $sanitize ]]; then
    filter=${filter:-'^(replicate|fully_shard|dtensor|optim)\.'}
    find_sanitizer
elif [[ -n $mps ]]; then
    start_mps
fi
at_once=${JOBS_CUDA:-$((($(nproc) + 3) / 4))}
begin=$SECONDS
while read -r binary pattern; do
    while (($(jobs -rp | wc -l) >= at_once)); do wait -n || true; done
    run_binary "$binary" "$pattern" </dev/null &
done <build/cuda/cuda_tests.txt
wait
python3 scripts/summarize_tests.py "$results" --seconds $((SECONDS - begin))
