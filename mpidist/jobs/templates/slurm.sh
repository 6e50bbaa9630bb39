{% extends "base.sh" %}
{% set job = "$SLURM_JOB_ID" %}
{% set job_name = "$SLURM_JOB_NAME" %}
{% set task = "$SLURM_ARRAY_TASK_ID" %}
{% set restarts = "${SLURM_RESTART_COUNT:-0}" %}
{% set cores = "$SLURM_CPUS_PER_TASK" ~ ("_HET_GROUP_0" if asked.servers) %}
{% set sizes = "$SLURM_JOB_NUM_NODES nodes ($SLURM_JOB_NODELIST)" %}
{% set scratch = asked.scratch %}
{% set launcher = "srun" %}
{% set term = "After scancel and at preemption Slurm itself sends TERM to the ranks: this script only waits for them." %}
{% set tell = 'kill -USR1 "$step"' %}
{% set ends = "TERM" %}
{% set own_timer = false %}

{% block title %}
Slurm job: {{ asked.nodes }} node{{ "s" if asked.nodes > 1 }}, {{ asked.ranks_per_node }} rank{{ "s" if asked.ranks_per_node > 1 }} a node, {{ asked.cores }} core{{ "s" if asked.cores > 1 }} a rank
{%- if asked.gpus_per_node %}, {{ asked.gpus_per_node }} GPU{{ "s" if asked.gpus_per_node > 1 }} a node{% endif %}
{%- if asked.servers %}; {{ asked.servers }} servers on one further node{% endif %}
{%- if asked.container %}; in a container{% endif %}
{% endblock %}

{% block header %}
{% if asked.container %}
# Scripts like this one were checked by `bash -n` and `sbatch --test-only` on Slurm 22.05; none has run in a container.
{% elif asked.gpus_per_node %}
# Scripts like this one were checked by `bash -n` and `sbatch --test-only` on Slurm 22.05; none has run on GPUs.
{% else %}
# Scripts like this one have run to their end on Slurm 22.05.
{% endif %}
# Submit it: sbatch FILE. See it: squeue --me. Stop it: scancel NUMBER.
{% endblock %}

{% block directives %}
#SBATCH --job-name={{ asked.name }}
{{ ("#SBATCH --nodes=" ~ asked.nodes) | noted("nodes") }}
{{ ("#SBATCH --ntasks-per-node=" ~ asked.ranks_per_node) | noted("ranks a node" ~ (": one for each GPU" if asked.gpus_per_node == asked.ranks_per_node else "")) }}
{{ ("#SBATCH --cpus-per-task=" ~ asked.cores) | noted("cores a rank") }}
{% if asked.gpus_per_node %}
{{ ("#SBATCH --gpus-per-node=" ~ asked.gpus_per_node) | noted("not --gpus-per-task, which hides the GPUs of a rank's neighbours") }}
{% endif %}
{% if asked.memory %}
{{ ("#SBATCH --mem=" ~ asked.memory ~ "M") | noted("of each node") }}
{% endif %}
{{ ("#SBATCH --time=" ~ asked.time | clock) | noted("hours:minutes:seconds") }}
{% if asked.partition %}
#SBATCH --partition={{ asked.partition }}
{% endif %}
{% if asked.account %}
#SBATCH --account={{ asked.account }}
{% endif %}
{% if asked.array %}
{{ ("#SBATCH --array=" ~ asked.array.first ~ "-" ~ asked.array.last ~ ("%" ~ asked.array.most if asked.array.most else "")) | noted(("at most " ~ asked.array.most ~ " tasks at once") if asked.array.most else "the tasks' numbers") }}
{{ "#SBATCH --output=%x-%A_%a.out" | noted("a file for each task: name, job, task") }}
{% else %}
{{ "#SBATCH --output=%x-%j.out" | noted("name, job") }}
{% endif %}
{{ "#SBATCH --open-mode=append" | noted("a restart adds to the output") }}
{% if asked.save_before %}
{{ ("#SBATCH --signal=B:USR1@" ~ asked.save_before) | noted("seconds before the time limit; B: to this script; Slurm may send it a minute early") }}
{% endif %}
{% if asked.requeue %}
{{ "#SBATCH --requeue" | noted("Slurm may put it back in the queue: at preemption, when a node fails") }}
{% else %}
{{ "#SBATCH --no-requeue" | noted("when a node fails it is not started anew") }}
{% endif %}
{% for line in asked.directives %}
#SBATCH {{ line }}
{% endfor %}
{% if asked.servers %}
{{ "#SBATCH hetjob" | noted("the second component: its ranks are the servers, with no GPUs") }}
{{ "#SBATCH --nodes=1" | noted("nodes") }}
{{ ("#SBATCH --ntasks-per-node=" ~ asked.servers) | noted("servers") }}
{{ ("#SBATCH --cpus-per-task=" ~ asked.cores) | noted("cores a server") }}
{% if asked.memory %}
{{ ("#SBATCH --mem=" ~ asked.memory ~ "M") | noted("of its node") }}
{% endif %}
{% if asked.partition %}
#SBATCH --partition={{ asked.partition }}
{% endif %}
{% if asked.account %}
#SBATCH --account={{ asked.account }}
{% endif %}
{% endif %}
{% endblock %}

{% block environment %}
{% if asked.mpi.startswith("pmix") %}
# With Open MPI: when a rank is killed, its neighbours have a second to name it before the job ends.
export OMPI_MCA_mpi_abort_delay=1
{% endif %}
{% endblock %}

{% block launch %}
{% if not asked.servers %}
# srun is to count nodes times ranks a node: Slurm's own number stays that of the first start. While the job is pending
# again, it can be given other nodes: scontrol update JobId=NUMBER NumNodes=1 NumTasks=RANKS NumCPUs=CORES.
unset SLURM_NTASKS SLURM_NPROCS
{% endif %}
# --mpi                how the ranks find each other: pmix for Open MPI, pmi2 for MPICH; `srun --mpi=list` has all
{% if asked.servers %}
# --het-group          one world of both components; without it srun starts the first one only
{% else %}
# --ntasks-per-node    the same number on each node; -n alone may fill one node first
{% endif %}
# --cpus-per-task      again: since Slurm 22.05 srun does not take it from the job
# --kill-on-bad-exit   all ranks end as soon as one fails
{% if asked.gpus_per_node %}
# --gpu-bind=none      each rank sees all GPUs of its node, or NCCL cannot use NVLink; it takes that of its local rank
{% endif %}
{% if asked.apptainer %}
# The MPI is that of the container, and has to fit --mpi.{{ " --nv brings the GPUs' driver into it." if asked.gpus_per_node }}
{% elif asked.pyxis %}
# The MPI is that of the container, and has to fit --mpi. The folders that the job needs are mounted under their names.
{% endif %}
srun --mpi={{ asked.mpi }} {{ "--het-group=0,1" if asked.servers else '--ntasks-per-node="$SLURM_NTASKS_PER_NODE"' }} --cpus-per-task="{{ cores }}" --kill-on-bad-exit=1 \
{% if asked.gpus_per_node %}
    {{ '--gpus-per-node="$SLURM_GPUS_PER_NODE" ' if not asked.servers }}--gpu-bind=none \
{% endif %}
{% if asked.apptainer %}
    apptainer exec {{ "--nv " if asked.gpus_per_node }}--bind "$PWD,$folder" {{ asked.apptainer | place }} \
{% elif asked.pyxis %}
    --container-image {{ asked.pyxis | place }} --container-mounts="$PWD:$PWD,$folder:$folder" --container-workdir="$PWD" \
{% endif %}
    "$python" {{ asked.script | word }}{% for argument in asked.arguments %} {{ argument | word }}{% endfor %}{{ " &" if asked.save_before }}
{% endblock %}

{% block lost_node %}
# Has a node been lost? Slurm takes minutes to see it, but a step that cannot start there fails at once. This node, whose
# script still runs, is asked first: where no step can start here either, no node is to blame, as at the time limit.
answers() { timeout 60 srun --mpi=none --overlap --nodelist="$1" --nodes=1 --ntasks-per-node=1 --ntasks=1 true; }
if [ "$status" -ne 0 ] && [ -z "$reason$ended" ] && answers "$SLURMD_NODENAME"; then
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        answers "$node" || reason="${reason:+$reason, }$node does not answer"
    done
fi
{% endblock %}

{% block requeue %}
scontrol requeue "$SLURM_JOB_ID"
{% endblock %}
