{% extends "hosts.sh" %}
{% set name = "Flux" %}
{% set usage = "Submit it: flux batch FILE. See it: flux jobs -a. Stop it: flux cancel NUMBER." %}
{% set job = "$(flux getattr jobid 2>/dev/null)" %}
{% set restarts = "${RESTARTS:-0}" %}
{% set launcher = "Flux" %}
{% set sizes = "$nodes nodes" %}
{% set tell = 'flux job kill --signal=SIGUSR1 "$(flux job last)"' %}

{% block directives %}
# flux: --job-name={{ asked.name }}
{{ ("# flux: --nodes=" ~ asked.nodes) | noted("nodes") }}
{{ ("# flux: --nslots=" ~ asked.ranks) | noted("ranks: nodes x ranks a node") }}
{{ ("# flux: --cores-per-slot=" ~ asked.cores) | noted("cores a rank") }}
{% if asked.gpus_per_node %}
{{ ("# flux: --gpus-per-slot=1") | noted("GPUs a rank") }}
{% endif %}
{{ ("# flux: --time-limit=" ~ asked.time ~ "s") | noted("seconds") }}
{% if asked.partition %}
# flux: --queue={{ asked.partition }}
{% endif %}
{% if asked.account %}
# flux: --setattr=bank={{ asked.account }}
{% endif %}
{{ ("# flux: --output=" ~ asked.name ~ "-{{id}}.out") | noted("name, job") }}
{% for line in asked.directives %}
# flux: {{ line }}
{% endfor %}
{% endblock %}

{% block start %}
{{ ("nodes=" ~ asked.nodes) | noted("nodes, as above") }}
{{ ("ranks_per_node=" ~ asked.ranks_per_node) | noted("ranks a node" ~ (": one for each GPU" if asked.gpus_per_node == asked.ranks_per_node else "")) }}
{{ ("cores=" ~ asked.cores) | noted("cores a rank") }}
{% endblock %}

{% block environment %}
{% if asked.mpi == "pmix" %}
# With Open MPI: when a rank is killed, its neighbours have a second to name it before the job ends.
export OMPI_MCA_mpi_abort_delay=1
{% endif %}
{% endblock %}

{% block launch %}
# -n        ranks in all
# -o pmi    how the ranks find each other: pmix for Open MPI 5 (the plugin flux-pmix), simple for MPICH
flux run -N "$nodes" -n "$((nodes * ranks_per_node))" -c "$cores"{{ " -g 1" if asked.gpus_per_node }} -o pmi={{ asked.mpi }} \
    "$python" {{ asked.script | word }}{% for argument in asked.arguments %} {{ argument | word }}{% endfor %}{{ " &" if asked.save_before }}
{% endblock %}

{% block requeue %}
# Flux does not requeue: the script is submitted once more, to the instance around this job.
cp "$0" "$folder/job.sh" && flux --parent batch --env=RESTARTS="$((restarts + 1))" "$folder/job.sh"
{% endblock %}
