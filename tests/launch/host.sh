#!/bin/sh
# rsh for the hosts of hosts.py: runs a command, whose words a shell may have to unquote, with the network, the name and
# the processes of one of them. When the command ends, so does all that it started.
# Usage, inside the namespaces that hold them: host.sh HOST COMMAND...
host=$1
shift
exec ip netns exec "$host" unshare --uts --pid --fork --kill-child --mount-proc sh -c "hostname $host; exec $*"
