#!/bin/bash
# Slurm job: 2 nodes, 2 ranks a node, 2 cores a rank
#
# Printed by: mpidist job slurm --nodes 2 --ranks-per-node 2 --cores 2 --name digits-cpu --python '$HOME/venvs/mpidist/bin/python' --mpi pmix examples/train.py -- --epochs 60 --checkpoint '{checkpoints}' --resume
# Scripts like this one have run to their end on Slurm 22.05.
# Submit it: sbatch FILE. See it: squeue --me. Stop it: scancel NUMBER.

#SBATCH --job-name=digits-cpu
#SBATCH --nodes=2                   # nodes
#SBATCH --ntasks-per-node=2         # ranks a node
#SBATCH --cpus-per-task=2           # cores a rank
#SBATCH --time=01:00:00             # hours:minutes:seconds
#SBATCH --output=%x-%j.out          # name, job
#SBATCH --open-mode=append          # a restart adds to the output
#SBATCH --signal=B:USR1@120         # seconds before the time limit; B: to this script; Slurm may send it a minute early
#SBATCH --no-requeue                # when a node fails it is not started anew

set -u                              # a misspelt variable ends the script; not -e: ranks that end with 42 have not failed
python="$HOME/venvs/mpidist/bin/python" # where all nodes see it

# What the job keeps: in a folder that all nodes see (/tmp is one node's own), the same after a restart.
folder="${SCRATCH:-$PWD}/$SLURM_JOB_NAME"
checkpoints=$folder/checkpoints
mkdir -p "$checkpoints" || exit 1
rm -f "$checkpoints/requeue"        # of the start before this one; see the end
restarts=${SLURM_RESTART_COUNT:-0}  # how often this job was put back in the queue
echo "$(date '+%F %T') $(hostname): job $SLURM_JOB_ID, $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), restart $restarts"

# Linear algebra on a rank's own cores only, or every rank starts as many threads as the node has cores.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# With Open MPI: when a rank is killed, its neighbours have a second to name it before the job ends.
export OMPI_MCA_mpi_abort_delay=1

step=
# 120 s before the time limit: srun passes USR1 to the ranks, which save and end with status 42.
trap 'echo "$(date "+%F %T") USR1: the ranks are told to save"; [ -z "$step" ] || kill -USR1 "$step"' USR1
# After scancel and at preemption Slurm itself sends TERM to the ranks: this script only waits for them.
trap 'echo "$(date "+%F %T") TERM: the job is ended from outside"' TERM

# srun is to count nodes times ranks a node: Slurm's own number stays that of the first start. While the job is pending
# again, it can be given other nodes: scontrol update JobId=NUMBER NumNodes=1 NumTasks=RANKS NumCPUs=CORES.
unset SLURM_NTASKS SLURM_NPROCS
# --mpi                how the ranks find each other: pmix for Open MPI, pmi2 for MPICH; `srun --mpi=list` has all
# --ntasks-per-node    the same number on each node; -n alone may fill one node first
# --cpus-per-task      again: since Slurm 22.05 srun does not take it from the job
# --kill-on-bad-exit   all ranks end as soon as one fails
srun --mpi=pmix --ntasks-per-node="$SLURM_NTASKS_PER_NODE" --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    "$python" examples/train.py --epochs 60 --checkpoint "$checkpoints" --resume &
step=$!
# A signal to this script ends `wait`, but not the ranks: wait until they have ended, then ask for their status.
while wait "$step"; kill -0 "$step" 2>/dev/null; do :; done
wait "$step"
status=$?
echo "$(date '+%F %T') the ranks ended with status $status"

# Why should the job go on later? Ranks that have saved end with status 42, and the chief leaves the file `requeue` beside
# its checkpoints, which counts too: when ranks end one after another, a signal to the last of them can hide the 42.
reason=
if [ "$status" -eq 42 ] || [ -e "$checkpoints/requeue" ]; then reason=saved; fi
[ -z "$reason" ] || echo "$(date '+%F %T') $reason: submit the script again to go on"
exit "$status"
