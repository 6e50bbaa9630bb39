#!/bin/bash
# LSF job: 2 nodes, 4 ranks a node, 8 cores a rank, 4 GPUs a node
#
# Printed by: mpidist job lsf --nodes 2 --cores 8 --gpus-per-node 4 --name digits-gpu --requeue 10 --python '$HOME/venvs/mpidist/bin/python' examples/train.py -- --epochs 60 --checkpoint '{checkpoints}' --resume
# It was checked by `bash -n`, and written from manuals: it has not been run under LSF.
# Submit it: bsub < FILE (with <). See it: bjobs -l NUMBER. Stop it: bkill NUMBER.

#BSUB -J digits-gpu
# slots, one for each core: nodes x ranks a node x cores a rank
#BSUB -n 64
# slots of a node: ranks a node x cores a rank
#BSUB -R "span[ptile=32]"
#BSUB -gpu "num=4/host"
# hours:minutes
#BSUB -W 1:00
# -o adds to the file, -oo would begin it anew
#BSUB -o digits-gpu-%J.out
# a job that ends with this status goes back to the queue
#BSUB -Q "42"

set -u                              # a misspelt variable ends the script; not -e: ranks that end with 42 have not failed
python="$HOME/venvs/mpidist/bin/python" # where all nodes see it
ranks_per_node=4                    # ranks a node: one for each GPU
cores=8                             # cores a rank
# $LSB_MCPU_HOSTS is a name and a number of slots for each node
hosts=$(xargs -n 2 <<<"$LSB_MCPU_HOSTS" | sed "s/ .*/:$ranks_per_node/" | paste -sd, -)
nodes=$(tr , '\n' <<<"$hosts" | wc -l)

# What the job keeps: in a folder that all nodes see (/tmp is one node's own), the same after a restart.
folder="${SCRATCH:-$PWD}/digits-gpu"
checkpoints=$folder/checkpoints
mkdir -p "$checkpoints" || exit 1
rm -f "$checkpoints/requeue"        # of the start before this one; see the end
restarts=$(cat "$folder/.restarts-$LSB_JOBID" 2>/dev/null || echo 0) # how often this job was put back in the queue
echo "$(date '+%F %T') $(hostname): job $LSB_JOBID, $nodes nodes ($hosts), restart $restarts"

# Restarts that save nothing lead nowhere: the third in a row stops.
idle=0
if [ "$restarts" -gt 0 ] && [ -z "$(find "$checkpoints" -type f -newer "$folder/.started" -print -quit)" ]; then
    idle=$(($(cat "$folder/.idle") + 1))
fi
echo "$idle" >"$folder/.idle"
touch "$folder/.started"
if [ "$idle" -ge 3 ]; then
    echo "$(date '+%F %T') the last $idle starts have saved nothing in $checkpoints: the job stops"
    exit 1
fi

# Linear algebra on a rank's own cores only, or every rank starts as many threads as the node has cores.
export OMP_NUM_THREADS=$cores
# NCCL's log, a file for each rank: host and process are in its name.
export NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$folder/nccl.%h.%p"
# With Open MPI: when a rank is killed, its neighbours have a second to name it before the job ends.
export OMPI_MCA_mpi_abort_delay=1

step=
ended=
# 120 s before the time limit: mpidist run passes USR1 to the ranks, which save and end with status 42.
trap 'echo "$(date "+%F %T") USR1: the ranks are told to save"; [ -z "$step" ] || kill -USR1 "$step"' USR1
# bkill sends INT, TERM and KILL, 10 s apart: wait for what the ranks still do.
trap 'ended=yes; echo "$(date "+%F %T") INT or TERM: the job is ended from outside"' INT TERM
# LSF gives no such signal, or each site another one: a timer of this script does.
# `read` waits as `sleep` does, without a process that could outlive the job.
(read -rt 3480 <> <(:); kill -USR1 $$) &
timer=$!

# --hosts   the job's nodes, each with its number of ranks; mpirun reaches them by ssh, which must ask for no password, or with MPICH by blaunch
# -x        variables that the ranks on other nodes get too
"$python" -m mpidist run -n "$((nodes * ranks_per_node))" --hosts "$hosts" -x OMP_NUM_THREADS \
    -x NCCL_DEBUG -x NCCL_DEBUG_FILE \
    examples/train.py --epochs 60 --checkpoint "$checkpoints" --resume &
step=$!
# A signal to this script ends `wait`, but not the ranks: wait until they have ended, then ask for their status.
while wait "$step"; kill -0 "$step" 2>/dev/null; do :; done
wait "$step"
status=$?
# Twice: one that has just begun may miss a signal.
for _ in 1 2; do kill "$timer" 2>/dev/null && sleep 0.1; done
echo "$(date '+%F %T') the ranks ended with status $status"

# Why should the job go on later? Ranks that have saved end with status 42, and the chief leaves the file `requeue` beside
# its checkpoints, which counts too: when ranks end one after another, a signal to the last of them can hide the 42.
reason=
if [ "$status" -eq 42 ] || [ -e "$checkpoints/requeue" ]; then reason=saved; fi
if [ -n "$reason" ] && [ -z "$ended" ]; then
    if [ "$restarts" -lt 10 ]; then
        echo "$(date '+%F %T') $reason: the job goes back to the queue"
        echo "$((restarts + 1))" >"$folder/.restarts-$LSB_JOBID"
        exit 42                             # LSF requeues by the status, see -Q
    else
        echo "$(date '+%F %T') $reason, after 10 restarts, which is the limit: submit the script again to go on"
    fi
fi
[ "$status" -ne 42 ] || status=1    # with 42 LSF would requeue the job all the same
exit "$status"
