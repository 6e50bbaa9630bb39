#!/bin/bash
# {% block title %}{% endblock %}

#
# Printed by: {{ command_line }}
{% if site %}
# Defaults of {{ site }}
{% endif %}
{% block header %}
{% endblock %}

{% block directives %}
{% endblock %}

{{ "set -u" | noted("a misspelt variable ends the script; not -e: ranks that end with 42 have not failed") }}
{% for line in asked.setup %}
{{ line }}
{% endfor %}
{{ ("python=" ~ asked.python | place) | noted("the container's" if asked.container else "where all nodes see it") }}
{% block start %}
{% endblock %}

# What the job keeps: in a folder that all nodes see (/tmp is one node's own), the same after a restart.
folder={{ (scratch ~ "/" ~ job_name ~ ("-" ~ task if asked.array else "")) | place }}
checkpoints=$folder/checkpoints
{% if asked.array %}
task={{ task }}
{% endif %}
mkdir -p "$checkpoints" || exit 1
{% if asked.save_before %}
{{ 'rm -f "$checkpoints/requeue"' | noted("of the start before this one; see the end") }}
{% endif %}
{{ ("restarts=" ~ restarts) | noted("how often this job was put back in the queue") }}
echo "$(date '+%F %T') $(hostname): job {{ job }}, {{ sizes }}, restart $restarts"
{% if asked.requeue %}

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
{% endif %}

# Linear algebra on a rank's own cores only, or every rank starts as many threads as the node has cores.
export OMP_NUM_THREADS={{ cores }}
{% if asked.gpus_per_node %}
# NCCL's log, a file for each rank: host and process are in its name.
export NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$folder/nccl.%h.%p"
{% endif %}
{% block environment %}
{% endblock %}
{% if asked.save_before %}

step=
{% if asked.requeue %}
ended=
{% endif %}
# {{ asked.save_before }} s before the time limit: {{ launcher }} passes USR1 to the ranks, which save and end with status 42.
trap 'echo "$(date "+%F %T") USR1: the ranks are told to save"; [ -z "$step" ] || {{ tell }}' USR1
# {{ term }}
trap '{{ "ended=yes; " if asked.requeue }}echo "$(date "+%F %T") {{ ends | replace(" ", " or ") }}: the job is ended from outside"' {{ ends }}
{% block timer %}
{% endblock %}
{% endif %}

{% block launch %}
{% endblock %}
{% if asked.save_before %}
step=$!
# A signal to this script ends `wait`, but not the ranks: wait until they have ended, then ask for their status.
while wait "$step"; kill -0 "$step" 2>/dev/null; do :; done
wait "$step"
{% endif %}
status=$?
{% if asked.save_before and own_timer %}
# Twice: one that has just begun may miss a signal.
for _ in 1 2; do kill "$timer" 2>/dev/null && sleep 0.1; done
{% endif %}
echo "$(date '+%F %T') the ranks ended with status $status"
{% if asked.save_before %}

# Why should the job go on later? Ranks that have saved end with status 42, and the chief leaves the file `requeue` beside
# its checkpoints, which counts too: when ranks end one after another, a signal to the last of them can hide the 42.
reason=
if [ "$status" -eq 42 ] || [ -e "$checkpoints/requeue" ]; then reason=saved; fi
{% if asked.requeue %}
{% block lost_node %}
{% endblock %}
if [ -n "$reason" ] && [ -z "$ended" ]; then
    if [ "$restarts" -lt {{ asked.requeue }} ]; then
        echo "$(date '+%F %T') $reason: the job goes back to the queue"
{% filter indent(8, first=True) %}
{% block requeue %}
{% endblock %}
{% block refused %}
[ $? -eq 0 ] || echo "$(date '+%F %T') the queue has not taken it: submit the script again to go on"
{% endblock %}
{% endfilter %}
    else
        echo "$(date '+%F %T') $reason, after {{ asked.requeue }} restarts, which is the limit: submit the script again to go on"
    fi
fi
{% else %}
[ -z "$reason" ] || echo "$(date '+%F %T') $reason: submit the script again to go on"
{% endif %}
{% endif %}
{% block leave %}
{% endblock %}
exit "$status"
