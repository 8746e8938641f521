#!/usr/bin/env bash
# Starts a run with the deepspeed launcher on the hosts of a hostfile (one line a host: its name and slots=ranks).
# Usage: run.sh CONFIG [key=value ...]               on one host, which reaches the others by pdsh over ssh
#        NODE_RANK=0 run.sh CONFIG [key=value ...]   without ssh: on each host, with the number of its line, from 0
# Add train.engine=deepspeed train.deepspeed_config=examples/deepspeed/ds.json to train with DeepSpeed's engine too.
# HOSTFILE: another hostfile than the one in this folder. MASTER_PORT: another port than 29500.
set -euo pipefail
hostfile=${HOSTFILE:-$(dirname "$0")/hostfile}
options=(--hostfile "$hostfile" --master_port "${MASTER_PORT:-29500}")
if [[ -n ${NODE_RANK:-} ]]; then
    read -r first _ <"$hostfile"
    options+=(--no_ssh --node_rank "$NODE_RANK" --master_addr "$first")
fi
exec deepspeed "${options[@]}" --module megalin train "$@"
