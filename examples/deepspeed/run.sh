#!/usr/bin/env bash
# Starts a run by the deepspeed launcher, on the hosts of a hostfile: a line each, its name and slots=ranks.
# Usage: run.sh CONFIG [key=value ...]               on one of them, which reaches the others by pdsh over ssh
#        NODE_RANK=0 run.sh CONFIG [key=value ...]   on each of them, with the number of its line from 0: without ssh
# With train.engine=deepspeed train.deepspeed_config=examples/deepspeed/ds.json its engine trains as well as its launcher
# starts. HOSTFILE names another hostfile than the one beside this script, MASTER_PORT another port than 29500.
set -euo pipefail
hostfile=${HOSTFILE:-$(dirname "$0")/hostfile}
options=(--hostfile "$hostfile" --master_port "${MASTER_PORT:-29500}")
if [[ -n ${NODE_RANK:-} ]]; then
    read -r first _ <"$hostfile"
    options+=(--no_ssh --node_rank "$NODE_RANK" --master_addr "$first")
fi
exec deepspeed "${options[@]}" --module megalin train "$@"
