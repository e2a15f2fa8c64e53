# Starts the daemon of Grid Engine that was named, in the foreground. The master configures the cluster first.
set -eu
# Docker's DNS calls the sender of a connection by its container's name, which Grid Engine would not know.
for node in ctl n1 n2; do
    echo "$node $PROJECT-$node-1.${PROJECT}_default"
done > /var/lib/gridengine/default/common/host_aliases
export SGE_ND=true # in the foreground
if [ "$(hostname)" != ctl ]; then
    until qconf -sh > /dev/null 2>&1; do sleep 0.5; done
    exec "$@"
fi
"$@" &
master=$!
for node in ctl n1 n2; do
    until qconf -ah "$node" || qconf -sh | grep -qx "$node"; do sleep 0.5; done
    qconf -as "$node" # a job that goes on submits itself
done
cd /gridengine/configuration
qconf -Ahgrp hosts
qconf -Ap pe
qconf -Ackpt checkpoint
qconf -Aq queue
# What differs from the defaults: short intervals, and that a host that is lost is noticed.
qconf -ssconf | sed -e 's/^\(schedule_interval\) .*/\1 0:0:2/' -e 's/^\(flush_[a-z]*_sec\) .*/\1 1/' > /tmp/scheduler
qconf -Msconf /tmp/scheduler
qconf -sconf | sed -e 's/^\(load_report_time\) .*/\1 0:0:5/' -e 's/^\(max_unheard\) .*/\1 0:1:0/' \
    -e 's/^\(reschedule_unknown\) .*/\1 0:0:10/' -e 's/flush_time=[0-9:]*/flush_time=0:0:1/' > /tmp/global
qconf -Mconf /tmp/global
wait "$master"
