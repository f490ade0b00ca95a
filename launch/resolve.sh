# Sourced by the other scripts: sets the variables below from the machine if they are not set, prints and checks them.
#
#   NPROC_PER_NODE  processes on this machine; default: its GPUs
#   MAX_RESTARTS    how often a failed worker starts all of them again, from the newest complete checkpoint; default: 3
#   LOG_DIR         output of every rank, one folder each; default: runs/logs
#   LOG_RANKS       local ranks whose output is shown too, such as 0 or 0,1; default: all
#   TORCH_ELASTIC_SHUTDOWN_TIMEOUT
#                   seconds that processes have to end after SIGTERM: a step and a checkpoint; default: 120
#   PROGRAM         a script for torchrun to start; default: the module liger_dist_train
#   PYTHON          default: python

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python}
MAX_RESTARTS=${MAX_RESTARTS:-3}
LOG_DIR=${LOG_DIR:-runs/logs}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}

refuse() {
    echo "error: $1" >&2
    exit 2
}

# Fails unless the value of the variable named $1 is a number of at least $2.
check_number() {
    [[ ${!1} =~ ^[0-9]+$ ]] && ((${!1} >= $2)) || refuse "$1 is '${!1}'; expected a number of at least $2."
}

command -v "$PYTHON" >/dev/null || refuse "there is no program $PYTHON; set PYTHON to the one of your environment."
program=(-m liger_dist_train)
if [[ -n ${PROGRAM:-} ]]; then
    [[ -f $PROGRAM ]] || refuse "there is no program $PROGRAM; set PROGRAM."
    program=("$PROGRAM")
fi
looks="import importlib.util, torch; assert importlib.util.find_spec('liger_dist_train'); print(torch.cuda.device_count())"
[[ -z ${NPROC_PER_NODE:-} ]] || check_number NPROC_PER_NODE 1
check_number MAX_RESTARTS 0
gpus=$("$PYTHON" -c "$looks" 2>/dev/null) ||
    refuse "$PYTHON has no torch or no liger_dist; set PYTHON to the one of the environment they are installed in."
[[ $gpus -gt 0 || -n ${NPROC_PER_NODE:-} ]] || refuse "this machine has no GPU; set NPROC_PER_NODE to train on its CPUs."
NPROC_PER_NODE=${NPROC_PER_NODE:-$gpus}
((gpus == 0 || NPROC_PER_NODE <= gpus)) || refuse "NPROC_PER_NODE is $NPROC_PER_NODE but this machine has $gpus GPUs."
mkdir -p "$LOG_DIR" || refuse "nothing can be written to LOG_DIR $LOG_DIR."

torchrun=("$PYTHON" -m torch.distributed.run --nproc-per-node "$NPROC_PER_NODE" --max-restarts "$MAX_RESTARTS"
    --log-dir "$LOG_DIR" --tee 3 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
[[ -z ${LOG_RANKS:-} ]] || torchrun+=(--local-ranks-filter "$LOG_RANKS")
if [[ $gpus -eq 0 ]]; then
    # Processes share the cores.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
