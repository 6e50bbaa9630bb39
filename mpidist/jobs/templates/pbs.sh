{% extends "hosts.sh" %}
{% set name = "PBS Pro" %}
{% set usage = "Submit it: qsub FILE. See it: qstat -f NUMBER. Stop it: qdel NUMBER." %}
{% set job = "$PBS_JOBID" %}
{% set restarts = "${RESTARTS:-0}" %}
{% set scratch = asked.scratch | replace("$PWD", "$PBS_O_WORKDIR") %}

{% block directives %}
#PBS -N {{ asked.name }}
# select=nodes:ncpus=cores of a node:mpiprocs=ranks a node, which would be 1:ompthreads=cores a rank
#PBS -l select={{ asked.nodes }}:ncpus={{ asked.ranks_per_node * asked.cores }}:mpiprocs={{ asked.ranks_per_node }}:ompthreads={{ asked.cores }}{{ ":ngpus=" ~ asked.gpus_per_node if asked.gpus_per_node }}{{ ":mem=" ~ asked.memory ~ "mb" if asked.memory }}
# each part on a node of its own
#PBS -l place=scatter
#PBS -l walltime={{ asked.time | clock }}
{% if asked.partition %}
#PBS -q {{ asked.partition }}
{% endif %}
{% if asked.account %}
#PBS -A {{ asked.account }}
{% endif %}
# errors and output in one file, NAME.oNUMBER, which grows while the job runs
#PBS -j oe
#PBS -k doe
{% if asked.requeue %}
# PBS may start the job again: when a node fails, at preemption
#PBS -r y
{% else %}
#PBS -r n
{% endif %}
{% for line in asked.directives %}
#PBS {{ line }}
{% endfor %}
{% endblock %}

{% block hosts %}
{{ 'cd "$PBS_O_WORKDIR" || exit 1' | noted("PBS starts in the home folder") }}
hosts=$(sort -u "$PBS_NODEFILE" | sed "s/$/:$ranks_per_node/" | paste -sd, -)
{% endblock %}

{% block requeue %}
# qrerun is for operators, so the script is submitted once more; PBS has a copy of it, which ends with the job.
cp "$0" "$folder/job.sh" && qsub -v RESTARTS="$((restarts + 1))" "$folder/job.sh"
{% endblock %}
