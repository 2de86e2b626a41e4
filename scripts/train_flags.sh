#!/usr/bin/env bash
# What `make train` adds to `tessera train`, to stdout, given ARGS. Where libtorch has CUDA and there is a GPU: that, and a
# model worth it. Else nothing. Flags of ARGS come behind and win; --device, --config and --resume in them decide alone.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

for word in "$@"; do
    case $word in --device* | --config* | --resume*) exit 0 ;; esac
done
torch=$(scripts/find_torch.sh --quiet)
[[ -e $torch/lib/libtorch_cuda.so ]] || exit 0
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
    visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true)
    if ((visible < gpus)); then gpus=$visible; fi
fi
((gpus > 0)) || exit 0
ranks=1  # as many as divide the batch
while ((ranks * 2 <= gpus && ranks < 32)); do ranks=$((ranks * 2)); done
echo "make train: a GPU is here, so 12 blocks of width 768 in bf16 on $ranks of $gpus; ARGS=\"--device cpu\" trains the small" \
    "model on the CPU" >&2
echo --device cuda --ranks $ranks --precision bf16 --blocks 12 --width 768 --heads 12 --context 512 --batch 32 \
    --dropout 0.1 --lr 6e-4 --min-lr 6e-5 --warmup 100 --save-every 500
