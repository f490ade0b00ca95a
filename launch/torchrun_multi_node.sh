#!/usr/bin/env bash
# Several machines: run the same line on each of them.
#
#   NNODES=4 RDZV_ENDPOINT=node-1:29500 launch/torchrun_multi_node.sh launch/llama_8b.yaml --resume true
#
#   NNODES         machines; 2:4 starts with two and takes up to four
#   RDZV_ENDPOINT  host and free port of one of them, where they meet
#   RDZV_CONF      settings of the rendezvous; default: read_timeout=600, so that a link that is cut for minutes loses nothing
#   RDZV_ID        a name for the job, when several meet at one place; default: liger_dist
#
# --output_dir and --cache_dir have to be on a disk that all machines share. Options go to liger-dist train; the variables in
# launch/resolve.sh say the rest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/resolve.sh"
NNODES=${NNODES:-}
RDZV_ENDPOINT=${RDZV_ENDPOINT:-}
[[ $NNODES =~ ^[0-9]+(:[0-9]+)?$ ]] || refuse "NNODES is '$NNODES'; expected a number of machines, or two such as 2:4."
[[ $RDZV_ENDPOINT =~ ^[^:]+:[0-9]+$ ]] || refuse "RDZV_ENDPOINT is '$RDZV_ENDPOINT'; expected host:port, such as node-1:29500."
getent ahosts "${RDZV_ENDPOINT%:*}" >/dev/null || refuse "the host of RDZV_ENDPOINT, ${RDZV_ENDPOINT%:*}, is not known here."
# A store that is new for every attempt: in a shared one, processes would look for those that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
echo "$NNODES nodes of $NPROC_PER_NODE processes ($gpus GPUs here, $(hostname)), rendezvous at $RDZV_ENDPOINT," \
    "up to $MAX_RESTARTS restarts, logs in $LOG_DIR"
# How many nodes must remain for a run to go on without one; liger_dist_train ends torchrun where fewer do.
export MIN_NODES=${NNODES%%:*}
exec "${torchrun[@]}" --nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" \
    --rdzv-id "${RDZV_ID:-liger_dist}" --rdzv-conf "${RDZV_CONF:-read_timeout=600}" "${program[@]}" "$@"
