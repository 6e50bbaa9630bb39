{% extends "base.sh" %}
{# Schedulers under which `mpidist run` starts the ranks, on the hosts that they name, and a timer warns the job. #}
{% set job_name = asked.name %}
{% set task = "" %}
{% set cores = "$cores" %}
{% set sizes = sizes | default("$nodes nodes ($hosts)") %}
{% set scratch = scratch | default(asked.scratch) %}
{% set launcher = launcher | default("mpidist run") %}
{% set tell = tell | default('kill -USR1 "$step"') %}
{% set own_timer = true %}
{% set reach = reach | default("by ssh, which must ask for no password") %}
{% set ends = ends | default("TERM") %}
{% set term = term | default("The job is ended: wait for what the ranks still do.") %}

{% block title %}
{{ name }} job: {{ asked.nodes }} node{{ "s" if asked.nodes > 1 }}, {{ asked.ranks_per_node }} rank{{ "s" if asked.ranks_per_node > 1 }} a node, {{ asked.cores }} core{{ "s" if asked.cores > 1 }} a rank
{%- if asked.gpus_per_node %}, {{ asked.gpus_per_node }} GPU{{ "s" if asked.gpus_per_node > 1 }} a node{% endif %}
{% endblock %}

{% block header %}
# {{ shown | default("It was checked by `bash -n`, and written from manuals: it has not been run under " ~ name ~ ".") }}
# {{ usage }}
{% endblock %}

{% block start %}
{{ ("ranks_per_node=" ~ asked.ranks_per_node) | noted("ranks a node" ~ (": one for each GPU" if asked.gpus_per_node == asked.ranks_per_node else "")) }}
{{ ("cores=" ~ asked.cores) | noted("cores a rank") }}
{% block hosts %}
{% endblock %}
nodes=$(tr , '\n' <<<"$hosts" | wc -l)
{% endblock %}

{% block environment %}
# With Open MPI: when a rank is killed, its neighbours have a second to name it before the job ends.
export OMPI_MCA_mpi_abort_delay=1
{% endblock %}

{% block timer %}
# {{ name }} gives no such signal, or each site another one: a timer of this script does.
# `read` waits as `sleep` does, without a process that could outlive the job.
(read -rt {{ asked.time - asked.save_before }} <> <(:); kill -USR1 $$) &
timer=$!
{% endblock %}

{% block launch %}
# --hosts   the job's nodes, each with its number of ranks; mpirun reaches them {{ reach }}
# -x        variables that the ranks on other nodes get too
"$python" -m mpidist run -n "$((nodes * ranks_per_node))" --hosts "$hosts" -x OMP_NUM_THREADS \
{% if asked.gpus_per_node %}
    -x NCCL_DEBUG -x NCCL_DEBUG_FILE \
{% endif %}
    {{ asked.script | word }}{% for argument in asked.arguments %} {{ argument | word }}{% endfor %}{{ " &" if asked.save_before }}
{% endblock %}
