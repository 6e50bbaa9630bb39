#!/bin/bash
# Slurm job: 2 nodes, 4 ranks a node, 8 cores a rank, 4 GPUs a node; in a container
#
# Printed by: mpidist job slurm --nodes 2 --cores 8 --gpus-per-node 4 --name digits-pyxis --pyxis '$HOME/images/mpidist.sqsh' --mpi pmix examples/train.py -- --epochs 60 --checkpoint '{checkpoints}' --resume
# Scripts like this one were checked by `bash -n` and `sbatch --test-only` on Slurm 22.05; none has run in a container.
# Submit it: sbatch FILE. See it: squeue --me. Stop it: scancel NUMBER.

#SBATCH --job-name=digits-pyxis
#SBATCH --nodes=2                   # nodes
#SBATCH --ntasks-per-node=4         # ranks a node: one for each GPU
#SBATCH --cpus-per-task=8           # cores a rank
#SBATCH --gpus-per-node=4           # not --gpus-per-task, which hides the GPUs of a rank's neighbours
#SBATCH --time=01:00:00             # hours:minutes:seconds
#SBATCH --output=%x-%j.out          # name, job
#SBATCH --open-mode=append          # a restart adds to the output
#SBATCH --signal=B:USR1@120         # seconds before the time limit; B: to this script; Slurm may send it a minute early
#SBATCH --no-requeue                # when a node fails it is not started anew

set -u                              # a misspelt variable ends the script; not -e: ranks that end with 42 have not failed
python="python3"                    # the container's

# What the job keeps: in a folder that all nodes see (/tmp is one node's own), the same after a restart.
folder="${SCRATCH:-$PWD}/$SLURM_JOB_NAME"
checkpoints=$folder/checkpoints
mkdir -p "$checkpoints" || exit 1
rm -f "$checkpoints/requeue"        # of the start before this one; see the end
restarts=${SLURM_RESTART_COUNT:-0}  # how often this job was put back in the queue
echo "$(date '+%F %T') $(hostname): job $SLURM_JOB_ID, $SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST), restart $restarts"

# Linear algebra on a rank's own cores only, or every rank starts as many threads as the node has cores.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# NCCL's log, a file for each rank: host and process are in its name.
export NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$folder/nccl.%h.%p"
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
# --gpu-bind=none      each rank sees all GPUs of its node, or NCCL cannot use NVLink; it takes that of its local rank
# The MPI is that of the container, and has to fit --mpi. The folders that the job needs are mounted under their names.
srun --mpi=pmix --ntasks-per-node="$SLURM_NTASKS_PER_NODE" --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    --gpus-per-node="$SLURM_GPUS_PER_NODE" --gpu-bind=none \
    --container-image "$HOME/images/mpidist.sqsh" --container-mounts="$PWD:$PWD,$folder:$folder" --container-workdir="$PWD" \
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
