#!/bin/bash
# Flux job: 2 nodes, 4 ranks a node, 2 cores a rank
#
# Printed by: mpidist job flux --nodes 2 --ranks-per-node 4 --cores 2 --name digits-cpu --requeue 10 --python '$HOME/venvs/mpidist/bin/python' --mpi pmix examples/train.py -- --epochs 60 --checkpoint '{checkpoints}' --resume
# It was checked by `bash -n`, and written from manuals: it has not been run under Flux.
# Submit it: flux batch FILE. See it: flux jobs -a. Stop it: flux cancel NUMBER.

# flux: --job-name=digits-cpu
# flux: --nodes=2                   # nodes
# flux: --nslots=8                  # ranks: nodes x ranks a node
# flux: --cores-per-slot=2          # cores a rank
# flux: --time-limit=3600s          # seconds
# flux: --output=digits-cpu-{{id}}.out # name, job

set -u                              # a misspelt variable ends the script; not -e: ranks that end with 42 have not failed
python="$HOME/venvs/mpidist/bin/python" # where all nodes see it
nodes=2                             # nodes, as above
ranks_per_node=4                    # ranks a node
cores=2                             # cores a rank

# What the job keeps: in a folder that all nodes see (/tmp is one node's own), the same after a restart.
folder="${SCRATCH:-$PWD}/digits-cpu"
checkpoints=$folder/checkpoints
mkdir -p "$checkpoints" || exit 1
rm -f "$checkpoints/requeue"        # of the start before this one; see the end
restarts=${RESTARTS:-0}             # how often this job was put back in the queue
echo "$(date '+%F %T') $(hostname): job $(flux getattr jobid 2>/dev/null), $nodes nodes, restart $restarts"

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
# With Open MPI: when a rank is killed, its neighbours have a second to name it before the job ends.
export OMPI_MCA_mpi_abort_delay=1

step=
ended=
# 120 s before the time limit: Flux passes USR1 to the ranks, which save and end with status 42.
trap 'echo "$(date "+%F %T") USR1: the ranks are told to save"; [ -z "$step" ] || flux job kill --signal=SIGUSR1 "$(flux job last)"' USR1
# The job is ended: wait for what the ranks still do.
trap 'ended=yes; echo "$(date "+%F %T") TERM: the job is ended from outside"' TERM
# Flux gives no such signal, or each site another one: a timer of this script does.
# `read` waits as `sleep` does, without a process that could outlive the job.
(read -rt 3480 <> <(:); kill -USR1 $$) &
timer=$!

# -n        ranks in all
# -o pmi    how the ranks find each other: pmix for Open MPI 5 (the plugin flux-pmix), simple for MPICH
flux run -N "$nodes" -n "$((nodes * ranks_per_node))" -c "$cores" -o pmi=pmix \
    "$python" examples/train.py --epochs 60 --checkpoint "$checkpoints" --resume &
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
        # Flux does not requeue: the script is submitted once more, to the instance around this job.
        cp "$0" "$folder/job.sh" && flux --parent batch --env=RESTARTS="$((restarts + 1))" "$folder/job.sh"
        [ $? -eq 0 ] || echo "$(date '+%F %T') the queue has not taken it: submit the script again to go on"
    else
        echo "$(date '+%F %T') $reason, after 10 restarts, which is the limit: submit the script again to go on"
    fi
fi
exit "$status"
