#!/bin/bash
# Grid Engine job: 2 nodes, 4 ranks a node, 2 cores a rank
#
# Printed by: mpidist job sge --nodes 2 --ranks-per-node 4 --cores 2 --name digits-cpu --requeue 10 --python '$HOME/venvs/mpidist/bin/python' examples/train.py -- --epochs 60 --checkpoint '{checkpoints}' --resume
# Scripts like this one have run to their end on Son of Grid Engine 8.1.9.
# Submit it: qsub FILE. See it: qstat -j NUMBER. Stop it: qdel NUMBER.

#$ -N digits-cpu
# slots, one for each core: nodes x ranks a node x cores a rank. The name of the parallel environment is the site's
# (qconf -spl); its allocation rule must be the slots of a node, here 8
#$ -pe mpi 16
#$ -l h_rt=01:00:00
# start in the folder of qsub
#$ -cwd
#$ -S /bin/bash
# errors and output in one file; a restart adds to it
#$ -j y
#$ -o digits-cpu-$JOB_ID.out
# Grid Engine may start the job again: when a node fails
#$ -r y

set -u                              # a misspelt variable ends the script; not -e: ranks that end with 42 have not failed
python="$HOME/venvs/mpidist/bin/python" # where all nodes see it
ranks_per_node=4                    # ranks a node
cores=2                             # cores a rank
hosts=$(sed "s/ .*/:$ranks_per_node/" "$PE_HOSTFILE" | paste -sd, -) # a line a node; its name comes first
nodes=$(tr , '\n' <<<"$hosts" | wc -l)

# What the job keeps: in a folder that all nodes see (/tmp is one node's own), the same after a restart.
folder="${SCRATCH:-$PWD}/digits-cpu"
checkpoints=$folder/checkpoints
mkdir -p "$checkpoints" || exit 1
rm -f "$checkpoints/requeue"        # of the start before this one; see the end
restarts=${RESTARTS:-0}             # how often this job was put back in the queue
echo "$(date '+%F %T') $(hostname): job $JOB_ID, $nodes nodes ($hosts), restart $restarts"

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
# 120 s before the time limit: mpidist run passes USR1 to the ranks, which save and end with status 42.
trap 'echo "$(date "+%F %T") USR1: the ranks are told to save"; [ -z "$step" ] || kill -USR1 "$step"' USR1
# The job is ended: wait for what the ranks still do.
trap 'ended=yes; echo "$(date "+%F %T") TERM: the job is ended from outside"' TERM
# Grid Engine gives no such signal, or each site another one: a timer of this script does.
# `read` waits as `sleep` does, without a process that could outlive the job.
(read -rt 3480 <> <(:); kill -USR1 $$) &
timer=$!

# --hosts   the job's nodes, each with its number of ranks; mpirun reaches them by qrsh, if the parallel environment has control_slaves TRUE
# -x        variables that the ranks on other nodes get too
"$python" -m mpidist run -n "$((nodes * ranks_per_node))" --hosts "$hosts" -x OMP_NUM_THREADS \
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
        # Not exit 99: a job of several nodes would then wait for "clean up of a previous run" (8.1.9).
        cp "$0" "$folder/job.sh" && qsub -v RESTARTS="$((restarts + 1))" "$folder/job.sh"
        [ $? -eq 0 ] || echo "$(date '+%F %T') the queue has not taken it: submit the script again to go on"
    else
        echo "$(date '+%F %T') $reason, after 10 restarts, which is the limit: submit the script again to go on"
    fi
fi
exit "$status"
