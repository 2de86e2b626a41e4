#!/usr/bin/env bash
# test_multi_gpu.sh BUILD: the engines over NCCL on this machine's GPUs, the links' bandwidth, overlap. Ends within ten
# minutes with BUILD/multi-gpu-report.txt, which can be sent to us. With one GPU, 2 and 4 ranks share it.
set -uo pipefail
build=${1:?expected the build folder}
tessera=$build/bin/tessera
check=$build/bin/tests/multi_gpu_check
report=$build/multi-gpu-report.txt
log=$build/multi-gpu-last.log
deadline=$((SECONDS + 590))
most=100  # seconds of one check

# tell TEXT...: to the terminal and the report.
tell() { printf '%s\n' "$*" | tee -a "$report"; }

# facts COMMAND...: its output, or that there is none, into the report alone.
facts() {
  { printf '\n$ %s\n' "$*"; timeout -k 5 20 "$@" 2>&1 | head -n 200 || echo "(not available)"; } >> "$report"
}

# GB/s of PCIe in one direction: lanes by what a lane of the generation carries.
pcie_peak() {
  timeout 20 nvidia-smi --query-gpu=pcie.link.gen.max,pcie.link.width.max --format=csv,noheader,nounits 2>/dev/null |
    awk -F', *' 'BEGIN {lane[1] = .25; lane[2] = .5; lane[3] = .985; lane[4] = 1.969; lane[5] = 3.938; lane[6] = 7.563}
      ($1 in lane) {gbps = lane[$1] * $2; if (!least || gbps < least) least = gbps} END {printf "%.0f\n", least}'
}

# GB/s of the first GPU's NVLinks together; 0 if two GPUs are connected otherwise.
nvlink_peak() {
  timeout 20 nvidia-smi topo -m 2>/dev/null | awk '
    {gsub(/\033\[[0-9;]*m/, "")}
    /^GPU[0-9]+/ {rows++; for (i = 2; i <= NF && ($i == "X" || $i ~ /^(NV[0-9]+|PIX|PXB|PHB|NODE|SYS)$/); i++)
      if (i - 2 < count && $i != "X" && $i !~ /^NV/) other = 1}
    /^[ \t]*GPU0/ && !rows {for (i = 1; i <= NF; i++) if ($i ~ /^GPU[0-9]+$/) count++}
    END {exit other || count < 2}' || { echo 0; return; }
  timeout 20 nvidia-smi nvlink -s -i 0 2>/dev/null |
    awk '/Link [0-9]+:.*GB\/s/ {for (i = 1; i < NF; i++) if ($(i + 1) == "GB/s") sum += $i} END {printf "%.0f\n", sum}'
}

# run RANKS CHECK: its lines go into the report; what it printed besides, if it fails.
run() {
  local ranks=$1 name=$2 left=$((deadline - SECONDS)) status
  if [ "$left" -lt 10 ]; then
    tell "FAIL $name: not run, the ten minutes are over"
    return 1
  fi
  [ "$left" -lt "$most" ] || left=$most
  rm -rf "$build/multi-gpu-checkpoint"
  timeout -k 10 "$left" "$tessera" run -n "$ranks" --no-prefix --env NCCL_DEBUG=VERSION -- "$check" "$name" \
    --folder "$build/multi-gpu-checkpoint" --peak "$peak" > "$log" 2>&1
  status=$?
  rm -rf "$build/multi-gpu-checkpoint"
  nccl=${nccl:-$(grep -m 1 -o 'NCCL version [^ ]*' "$log")}
  grep -E '^(PASS|FAIL|       )' "$log" | tee -a "$report"
  [ "$status" -eq 0 ] && return 0
  if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    tell "FAIL $name: no end within $left s; its last lines:"
  elif ! grep -q '^FAIL' "$log"; then
    tell "FAIL $name: exit code $status; its last lines:"
  fi
  grep -vE '^(PASS|FAIL|       )' "$log" | tail -n 30 | sed 's/^/       | /' | tee -a "$report"
  return 1
}

[ -x "$check" ] && [ -x "$tessera" ] || { echo "test-multi-gpu: expected $check and $tessera; run make test-multi-gpu" >&2; exit 1; }
# What it prints to stderr, libtorch's reasons among them, is seen.
found=$(timeout 120 "$check" --devices) || { echo "test-multi-gpu: $check --devices: exit code $?" >&2; exit 1; }
read -r torch gpus <<< "$found"
if [ "${gpus:-0}" -eq 0 ]; then
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    echo "skipped: libtorch $torch finds no GPU; CUDA_VISIBLE_DEVICES is '$CUDA_VISIBLE_DEVICES'"
    exit 0
  elif ! compgen -G '/dev/nvidia[0-9]*' > /dev/null && [ ! -e /dev/dxg ]; then
    echo "skipped: no NVIDIA device"
    exit 0
  fi
  echo "test-multi-gpu: there is a GPU, but libtorch $torch finds none (a driver that is too old, or a libtorch without" \
    "CUDA); nvidia-smi says:" >&2
  timeout 20 nvidia-smi >&2
  exit 1
fi
checks=$("$check" --list) && [ -n "$checks" ] || { echo "test-multi-gpu: $check --list failed" >&2; exit 1; }

: > "$report"
tell "Tessera on $gpus GPU(s), $(date -u +%F\ %H:%M) UTC, libtorch $torch"
facts nvidia-smi
facts nvidia-smi --query-gpu=name,uuid,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max,compute_mode --format=csv
facts nvidia-smi topo -m
facts nvidia-smi nvlink -s
facts sh -c "grep -l '^nvidia-cuda-mps' /proc/[0-9]*/comm || echo 'MPS is off'"
facts uname -srm
facts nproc
facts git rev-parse HEAD

nccl=
peak=0
if [ "$gpus" -gt 1 ]; then
  peak=$(nvlink_peak)
  kind=NVLink
  if [ "${peak:-0}" -eq 0 ]; then
    peak=$(pcie_peak)
    kind=PCIe
  fi
  peak=${peak:-0}
  [ "$peak" -eq 0 ] && kind="unknown links"
  worlds="2"
  [ "$gpus" -gt 2 ] && worlds="2 $((gpus < 8 ? gpus : 8))"
  tell ""
  tell "links: $kind, $peak GB/s in one direction (0: unknown)"
else
  worlds="2 4"
  tell ""
  tell "One GPU: ranks share it, each as a host of its own (NCCL_HOSTID). Results count, times do not."
fi

failed=0
total=0
for ranks in $worlds; do
  tell ""
  tell "$ranks ranks"
  for name in $checks; do
    # Times of ranks that share a GPU say nothing: that they can be taken is shown once.
    [ "$gpus" -eq 1 ] && [ "$ranks" -gt 2 ] && [[ $name == bandwidth || $name == overlap ]] && continue
    total=$((total + 1))
    run "$ranks" "$name" || failed=$((failed + 1))
  done
done
tell ""
tell "${nccl:-NCCL version unknown}"
tell "$((total - failed)) of $total checks passed in $SECONDS s"
echo "The report: $report"
[ "$failed" -eq 0 ]
