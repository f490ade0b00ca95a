#!/usr/bin/env bash
# DeepSpeed's own launcher, from one machine to all that its hostfile names (it needs ssh without a password):
#
#   HOSTFILE=launch/deepspeed/hostfile launch/deepspeed_multi_node.sh zero3 launch/llama_8b.yaml --resume true
#
# The first word names a JSON in launch/deepspeed. launch/torchrun_multi_node.sh trains with DeepSpeed too, and without
# ssh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/resolve.sh"
HOSTFILE=${HOSTFILE:-$here/deepspeed/hostfile}
settings=$here/deepspeed/${1:-}.json
[[ -f $settings ]] || refuse "the first word is '${1:-}'; expected one of $(cd "$here/deepspeed" && echo *.json | sed 's/\.json//g')."
[[ -f $HOSTFILE ]] || refuse "there is no HOSTFILE $HOSTFILE; expected lines such as: node-1 slots=8"
hosts=$(grep -cE '^[^#[:space:]]+[[:space:]]+slots=[0-9]+' "$HOSTFILE" || true)
[[ $hosts -gt 0 ]] || refuse "HOSTFILE $HOSTFILE names no host; expected lines such as: node-1 slots=8"
echo "$hosts nodes by $HOSTFILE, $settings"
shift
exec "$PYTHON" -m deepspeed.launcher.runner --hostfile "$HOSTFILE" --no_local_rank "${program[@]/#-m/--module}" "$@" \
    --strategy deepspeed --deepspeed "$settings"
