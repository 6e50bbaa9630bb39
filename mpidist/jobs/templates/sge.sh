{% extends "hosts.sh" %}
{% set name = "Grid Engine" %}
{% set usage = "Submit it: qsub FILE. See it: qstat -j NUMBER. Stop it: qdel NUMBER." %}
{% set shown = "Scripts like this one have run to their end on Son of Grid Engine 8.1.9." %}
{% set job = "$JOB_ID" %}
{% set restarts = "${RESTARTS:-0}" %}
{% set reach = "by qrsh, if the parallel environment has control_slaves TRUE" %}

{% block directives %}
#$ -N {{ asked.name }}
# slots, one for each core: nodes x ranks a node x cores a rank. The name of the parallel environment is the site's
# (qconf -spl); its allocation rule must be the slots of a node, here {{ asked.ranks_per_node * asked.cores }}
#$ -pe mpi {{ asked.ranks * asked.cores }}
#$ -l h_rt={{ asked.time | clock }}
{% if asked.partition %}
#$ -q {{ asked.partition }}
{% endif %}
{% if asked.account %}
#$ -P {{ asked.account }}
{% endif %}
# start in the folder of qsub
#$ -cwd
#$ -S /bin/bash
# errors and output in one file; a restart adds to it
#$ -j y
#$ -o {{ asked.name }}-$JOB_ID.out
{% if asked.requeue %}
# Grid Engine may start the job again: when a node fails
#$ -r y
{% else %}
#$ -r n
{% endif %}
{% for line in asked.directives %}
#$ {{ line }}
{% endfor %}
{% endblock %}

{% block hosts %}
{{ 'hosts=$(sed "s/ .*/:$ranks_per_node/" "$PE_HOSTFILE" | paste -sd, -)' | noted("a line a node; its name comes first") }}
{% endblock %}

{% block requeue %}
# Not exit 99: a job of several nodes would then wait for "clean up of a previous run" (8.1.9).
cp "$0" "$folder/job.sh" && qsub -v RESTARTS="$((restarts + 1))" "$folder/job.sh"
{% endblock %}
