#!/usr/bin/env bash
# Two processes on CPUs, a minute: does this machine train at all?
#
#   launch/cpu_smoke.sh --strategy ddp
set -euo pipefail
export CUDA_VISIBLE_DEVICES=""
export NPROC_PER_NODE=2 MAX_RESTARTS=0
exec "$(dirname "${BASH_SOURCE[0]}")/torchrun_single_node.sh" --model tiny --steps 10 --sequence_length 64 --batch_size 2 \
    --vocab_size 600 --eval_every 5 --eval_batches 1 --checkpoint_every 5 --sample_tokens 8 --output_dir runs/smoke --overwrite true \
    --data "$(dirname "${BASH_SOURCE[0]}")/training" "$@"
