#!/bin/sh
# rsh for the hosts of hosts.py: runs a command, quoted for a shell, with the network, name and processes of a host. All
# processes that the command started end with it.
# Usage, inside the namespaces of the hosts: host.sh HOST COMMAND...
host=$1
shift
exec ip netns exec "$host" unshare --uts --pid --fork --kill-child --mount-proc sh -c "hostname $host; exec $*"
