#!/usr/bin/env bash
# The flags of `make train` for `tessera train`, to stdout, given ARGS: the text in tools/train/text as it lies in
# build/text, and a model that learns it in two minutes. Where libtorch has CUDA and there is a GPU: that, and GPT-2's
# sizes. Flags of ARGS come behind and win; --config and --resume in them decide alone, --data and --sft do on the text, and
# --model, --preset and --from on the model.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

has_data=0 has_validation=0 has_model=0 may_use_gpu=1
for word in "$@"; do
    case $word in
        --config* | --resume*) exit 0 ;;
        --data* | --sft*) has_data=1 ;;
        --validation-data*) has_validation=1 ;;
        --model* | --preset* | --from*) has_model=1 ;;
        --device*) may_use_gpu=0 ;;
    esac
done

count_gpus() {
    local torch gpus visible
    torch=$(scripts/find_torch.sh --quiet)
    [[ -e $torch/lib/libtorch_cuda.so ]] || { echo 0; return; }
    gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true)
        if ((visible < gpus)); then gpus=$visible; fi
    fi
    echo "$gpus"
}

flags=(--minutes 2)
((has_model)) || flags+=(--tokenizer tools/train/text/tokenizer.json)
if ((!has_data)); then
    flags+=(--data build/text/train)
    ((has_validation)) || flags+=(--validation-data build/text/validation)
fi

gpus=0
((may_use_gpu)) && gpus=$(count_gpus)
if ((gpus > 0)); then
    ranks=1  # as many as divide the batch
    while ((ranks * 2 <= gpus && ranks < 16)); do ranks=$((ranks * 2)); done
    model="GPT-2 124M's sizes"
    ((has_model)) && model="this model"
    echo "make train: a GPU is here, so $model in bf16 on $ranks of $gpus; ARGS=\"--device cpu\" trains the small" \
        "model on the CPU" >&2
    flags+=(--device cuda --ranks $ranks --precision bf16)
    ((has_model)) || flags+=(--model gpt2 --blocks 12 --width 768 --heads 12 --context 1024
        --vocabulary 50304 --batch 16 --steps 600 --lr 6e-4 --min-lr 6e-5 --save-every 0)
else
    # Without instructions for it bf16 is slower than fp32.
    precision=fp32
    if grep -qsE '\<(avx512_bf16|amx_bf16)\>' "${TESSERA_CPUINFO:-/proc/cpuinfo}"; then precision=bf16; fi
    flags+=(--precision $precision)
    ((has_model)) || flags+=(--optimizer muon --blocks 4 --width 192 --heads 4 --context 256 --batch 8 --steps 1000
        --lr 6e-3 --min-lr 2e-4 --save-every 300 --no-compile --prompt ///)
fi
echo "${flags[@]}"
