#!/usr/bin/env bash
# Builds and runs the tests that need a GPU, with several ranks on one device: `make test-cuda ARGS="..."`.
#   --has-gpu        no test: exit code 3, after a line that says why, where there is no GPU
#   --filter REGEX   only tests whose <binary>.<Suite>.<Test> matches
#   --no-mps         all tests without MPS. Otherwise it is started and ended here, where that can be done: ranks run at
#                    once instead of by turns
#   --sanitize       under compute-sanitizer (memcheck, stream-ordered memory), without MPS; without --filter some of the
#                    engines' tests, over shm alone: what NCCL does to its memory is its own affair
# Reads:
#   JOBS_CUDA        test processes that run side by side, each with its ranks (half the cores, at most 6)
#   JOBS             compilers that run at once (scripts/jobs.sh)
#   TESSERA_TORCH    the libtorch to build with (scripts/find_torch.sh: what is found by itself)
# Leaves JUnit files and logs in build/cuda/test-cuda. Succeeds where there is no GPU, after a line that says so.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

# Not under MPS, where a rank that faults, is killed or is cut off in a kernel takes the ranks of all tests with it: tests
# whose ranks are killed, stopped, time out or disagree, or stop the device. And those that read kernels from a profile.
apart='^comm\.([A-Za-z]+/)?(Peer|Disagree|NcclErrors)OnCuda\.'
apart+='|^parallel\.OnCuda/WrongTargets\.'
apart+='|^train\.TrainOnCuda\.(SurvivesTheDeath|EndsBySignal|[A-Za-z]*InTheTrace)|^replicate\..*InTheTrace'

# What a test costs against a small one of two ranks; the first expression that matches counts. Processes are given tests
# up to `most` of it, and those that have most of it start first.
most=120
costs="20 $apart"'
40 ^dtensor\.OperatorDatabase
15 ^(train|compiler)\.
2 _4$'

# Every kind of work of the engines on a device once: memcheck makes kernels many times slower.
sanitized='^replicate\..*/(Defaults|ViewsInSmallBuckets)_cuda_shm_2$'
sanitized+='|^replicate\..*\.(FindsUnusedParameters|HalfPrecisionHooks[A-Za-z]*)/cuda_shm_2$'
sanitized+='|^fully_shard\..*/(FullShard|KeptByNeighbours|Offloaded)_cuda_shm_2$'
sanitized+='|^fully_shard\..*\.(OffloadChangesNoBits|ComputesInLowPrecision|CheckpointedUnits[A-Za-z]*)/cuda_shm_2$'
sanitized+='|^optim\..*\.(EqualLibtorchsAndThoseOfTheCpu/.*|ShardedNormsAreThoseOfTheWhole/cuda_shm_2)$'
sanitized+='|^dtensor\..*\.(ProductsAndTheirGradients[A-Za-z]*|DropoutAndItsGradient[A-Za-z]*)/cuda_shm_2$'

results=build/cuda/test-cuda
filter=
sanitize=
has_gpu=
mps=1
while (($# > 0)); do
    case $1 in
        --filter) filter=${2:?--filter: expected a regular expression} && shift 2 ;;
        --has-gpu) has_gpu=3 && shift ;;
        --no-mps) mps= && shift ;;
        --sanitize) sanitize=1 && mps= && shift ;;
        *) echo "test-cuda: expected --filter REGEX, --no-mps or --sanitize, got '$1'" >&2 && exit 2 ;;
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
    mps_folder=$(mktemp -d) # a short path: sockets are in it
    mkdir "$results/mps"
    export CUDA_MPS_PIPE_DIRECTORY=$mps_folder CUDA_MPS_LOG_DIRECTORY=$PWD/$results/mps
    if command -v nvidia-cuda-mps-control >/dev/null && nvidia-cuda-mps-control -d </dev/null >/dev/null 2>&1; then
        echo "under MPS, but for tests whose ranks are killed, stopped or time out"
    else
        echo "MPS does not start here: without it"
        rm -rf "$mps_folder"
        unset mps_folder CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
        mps=
    fi
}

end_mps() {
    [[ -n ${mps_folder:-} ]] || return 0
    local daemon
    daemon=$(cat "$mps_folder/nvidia-cuda-mps-control.pid" 2>/dev/null || true)
    echo quit | timeout -k 5 30 nvidia-cuda-mps-control >/dev/null 2>&1 ||
        { [[ -z $daemon ]] || kill "$daemon" 2>/dev/null; } || true
    rm -rf "$mps_folder"
    unset mps_folder CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# A client that lost its server has errors 805 to 810 of CUDA, whatever its test does. Its process runs again without
# MPS; what it wrote under it stays as <process>.mps.log.
run_again_if_mps_broke() {
    local lost='cudaErrorMps|CUDA_ERROR_MPS|MPS (client|server)|error:? (80[5-9]|810)\b' status process broken=()
    for status in "$results"/*.status; do
        process=$(basename "$status" .status)
        if [[ $(<"$status") != 0 ]] && grep -qsE "$lost" "$results/$process.log"; then
            mv "$results/$process.log" "$results/$process.mps.log"
            broken+=("$process")
        fi
    done
    if ((${#broken[@]} == 0)); then
        status=$(grep -liE 'fatal|exception' "$results"/mps/*.log 2>/dev/null | paste -sd' ') || true
        [[ -z $status ]] || echo "MPS told of errors, so tests may have failed by what others did: $status"
        return 0
    fi
    echo "MPS broke down, by a test of one of these, which run again without it: ${broken[*]}"
    printf '1 %s\n' "${broken[@]}" >"$results/order.3"
    run_all "$results/order.3"
}

find_sanitizer() {
    local found
    for found in "$(command -v compute-sanitizer || true)" /usr/local/cuda/bin/compute-sanitizer; do
        if [[ -x $found ]]; then
            # Ranks are programs of their own, which it follows. Errors that calls return are the callers' affair: libraries
            # probe by them.
            runner=("$found" --tool memcheck --target-processes all --track-stream-ordered-races all
                --report-api-errors no --error-exitcode 99)
            # Of memory that the caching allocator hands on it would see nothing.
            export PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync
            return
        fi
    done
    echo "test-cuda --sanitize: expected compute-sanitizer of the CUDA toolkit on PATH or in /usr/local/cuda/bin" >&2
    exit 2
}

# Writes the GPU tests of a binary that were asked for, one per line.
list_tests() { # binary, pattern
    local all
    all=$("build/cuda/bin/tests/$1" --gtest_list_tests --gtest_filter="$2") ||
        { echo "$1: its tests can't be listed" && echo 1 >"$results/$1.status" && return; }
    awk -v binary="$1" '/^[^ ].*\.( |$)/ { suite = $1 } /^  / { print binary "." suite $1 }' <<<"$all" |
        { grep -E -- "${filter:-.}" || true; } >"$results/$1.list"
}

# Deals tests out to processes: <process>.tests for each, and lines "cost process" in order.1 and, for tests apart from
# MPS, order.2. Processes have 4 ranks or fewer, not both: ranks stay for the next test.
deal_tests() {
    # In a random order, the same in each run: instances of a test come by turns otherwise.
    cat "$results"/*.list | sort -R --random-source=/dev/zero |
        apart=${mps:+$apart} costs=$costs awk -v most="$most" -v results="$results" '
        BEGIN {
            rules = split(ENVIRON["costs"], lines, "\n")
            for (i = 1; i <= rules; ++i) {
                cost_of[i] = lines[i] + 0
                pattern_of[i] = substr(lines[i], index(lines[i], " ") + 1)
            }
        }
        {
            cost = 1
            for (i = rules; i >= 1; --i) if ($0 ~ pattern_of[i]) cost = cost_of[i]
            binary = substr($0, 1, index($0, ".") - 1)
            kind = binary (ENVIRON["apart"] != "" && $0 ~ ENVIRON["apart"] ? ".apart": /_4$/ ? ".4ranks" : "")
            costs[kind, count[kind] + 0] = cost
            tests[kind, count[kind]++] = substr($0, length(binary) + 2)
            sum[kind] += cost
        }
        END {
            for (kind in count) {
                parts = int((sum[kind] + most - 1) / most)
                if (parts > count[kind]) parts = count[kind]
                for (i = 0; i < count[kind]; ++i) {
                    least = 1
                    for (part = 2; part <= parts; ++part) if (load[kind, part] < load[kind, least]) least = part
                    load[kind, least] += costs[kind, i]
                    print tests[kind, i] >(results "/" kind "." least ".tests")
                }
                for (part = 1; part <= parts; ++part)
                    print load[kind, part], kind "." part >(results "/order." (kind ~ /\.apart$/ ? 2 : 1))
            }
        }'
}

run_tests() { # process
    local status=0 log=$results/$1.log
    # Ranks stay for the next test: to start one takes seconds.
    TESSERA_REUSE_RANKS=1 timeout -k 20 1800 "${runner[@]}" "build/cuda/bin/tests/${1%%.*}" \
        --gtest_filter="$(paste -sd: "$results/$1.tests")" --gtest_color=no --gtest_output="xml:$results/$1.xml" \
        >"$log" 2>&1 &
    # shellcheck disable=SC2064
    trap "kill $! 2>/dev/null; wait $!; exit 143" HUP INT TERM # it passes the signal on
    wait $! || status=$?
    if [[ -n $sanitize ]]; then
        # A log without a summary says nothing, least of all that there was no error.
        if grep -q 'ERROR SUMMARY: [1-9]' "$log" || ! grep -q 'ERROR SUMMARY: 0 errors' "$log"; then status=99; fi
        echo "$1: $(grep -c 'ERROR SUMMARY: 0 errors' "$log") clean summaries of compute-sanitizer," \
            "$(grep -c 'ERROR SUMMARY: [1-9]' "$log") with errors"
    fi
    echo "$status" >"$results/$1.status"
    echo "$1: done"
}

run_all() { # file with lines "cost process"
    local process
    for process in $(sort -rn "$1" | cut -d' ' -f2); do
        while (($(jobs -rp | wc -l) >= at_once)); do wait -n || true; done
        run_tests "$process" </dev/null &
    done
    wait
}

clean_up() {
    local running
    running=$(jobs -rp)
    # shellcheck disable=SC2086
    [[ -z $running ]] || { kill $running 2>/dev/null && wait; } || true
    end_mps
}

find_gpu
[[ -z $has_gpu ]] || exit 0
build
rm -rf "$results"
mkdir -p "$results"
runner=()
if [[ -n $sanitize ]]; then
    filter=${filter:-$sanitized}
    find_sanitizer
fi
# MPS takes 48 clients: a process has up to four ranks, and often a few more of an earlier test.
cores=$(nproc)
at_once=${JOBS_CUDA:-$((cores > 12 ? 6 : (cores + 1) / 2))}
begin=$SECONDS
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
while read -r binary pattern; do list_tests "$binary" "$pattern" </dev/null & done <build/cuda/cuda_tests.txt
wait
[[ -z $mps ]] || start_mps
: >"$results/order.1" && : >"$results/order.2"
deal_tests
run_all "$results/order.1"
if [[ -n $mps ]]; then
    end_mps
    run_again_if_mps_broke
    run_all "$results/order.2"
fi
python3 scripts/summarize_tests.py "$results" --seconds $((SECONDS - begin))
