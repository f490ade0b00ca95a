#!/usr/bin/env bash
# Two processes on CPUs, a minute: does this machine train at all?
#
#   launch/cpu_smoke.sh --strategy ddp
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
export CUDA_VISIBLE_DEVICES=""
export NPROC_PER_NODE=2 MAX_RESTARTS=0
[[ -d runs/smoke/tokenizer ]] ||
    PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python}" -m liger_dist_train tokenizer runs/smoke/tokenizer "$here/liger_dist_train" --vocab_size 600
exec "$here/torchrun_single_node.sh" --model tiny --tokenizer runs/smoke/tokenizer --data "$here/liger_dist_train" --steps 10 \
    --sequence_length 64 --batch_size 2 --eval_every 5 --eval_batches 1 --checkpoint_every 5 --output_dir runs/smoke \
    --overwrite true "$@"
