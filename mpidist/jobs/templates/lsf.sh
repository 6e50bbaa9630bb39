{% extends "hosts.sh" %}
{% set name = "LSF" %}
{% set usage = "Submit it: bsub < FILE (with <). See it: bjobs -l NUMBER. Stop it: bkill NUMBER." %}
{% set job = "$LSB_JOBID" %}
{% set restarts = '$(cat "$folder/.restarts-$LSB_JOBID" 2>/dev/null || echo 0)' %}
{% set reach = "by ssh, which must ask for no password, or with MPICH by blaunch" %}
{% set ends = "INT TERM" %}
{% set term = "bkill sends INT, TERM and KILL, 10 s apart: wait for what the ranks still do." %}

{% block directives %}
#BSUB -J {{ asked.name }}
# slots, one for each core: nodes x ranks a node x cores a rank
#BSUB -n {{ asked.ranks * asked.cores }}
# slots of a node: ranks a node x cores a rank
#BSUB -R "span[ptile={{ asked.ranks_per_node * asked.cores }}]"
{% if asked.gpus_per_node %}
#BSUB -gpu "num={{ asked.gpus_per_node }}/host"
{% endif %}
# hours:minutes
#BSUB -W {{ (asked.time + 59) // 3600 }}:{{ "%02d" % ((asked.time + 59) % 3600 // 60) }}
{% if asked.partition %}
#BSUB -q {{ asked.partition }}
{% endif %}
{% if asked.account %}
#BSUB -P {{ asked.account }}
{% endif %}
# -o adds to the file, -oo would begin it anew
#BSUB -o {{ asked.name }}-%J.out
{% if asked.requeue %}
# a job that ends with this status goes back to the queue
#BSUB -Q "42"
{% endif %}
{% for line in asked.directives %}
#BSUB {{ line }}
{% endfor %}
{% endblock %}

{% block hosts %}
# $LSB_MCPU_HOSTS is a name and a number of slots for each node
hosts=$(xargs -n 2 <<<"$LSB_MCPU_HOSTS" | sed "s/ .*/:$ranks_per_node/" | paste -sd, -)
{% endblock %}

{% block leave %}
{% if asked.requeue %}
{{ '[ "$status" -ne 42 ] || status=1' | noted("with 42 LSF would requeue the job all the same") }}
{% endif %}
{% endblock %}

{% block requeue %}
echo "$((restarts + 1))" >"$folder/.restarts-$LSB_JOBID"
{{ "exit 42" | noted("LSF requeues by the status, see -Q") }}
{% endblock %}
{% block refused %}
{% endblock %}
