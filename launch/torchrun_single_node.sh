#!/usr/bin/env bash
# All GPUs of one machine:
#
#   launch/torchrun_single_node.sh launch/llama_8b.yaml --strategy fsdp2 --resume true
#
# Options go to liger-dist train; the variables in launch/resolve.sh say the rest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/resolve.sh"
echo "1 node of $NPROC_PER_NODE processes ($gpus GPUs), up to $MAX_RESTARTS restarts, logs in $LOG_DIR"
exec "${torchrun[@]}" --standalone "${program[@]}" "$@"
