#!/usr/bin/env bash
# Trains a TransNormerLLM on this machine's own Python library: text, tokenizer, shards, training, evaluation.
# Usage: run.sh [key=value ...]   overrides of transnormer.toml, such as train.steps=1000
# Writes quickstart-data/ and runs/quickstart/ in the current folder, and replaces the results of an earlier run.
# CORPUS_SHARE=0.1 uses a tenth of the text.
set -euo pipefail
here=$(realpath --relative-to=. "$(dirname "$0")")
config=$here/transnormer.toml
data=quickstart-data
run=runs/quickstart

# One thread a process: the ranks share the machine, and idle OpenMP threads spin.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# By default glibc returns large blocks to the system at each free; the page faults took a quarter of the time.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824

say() { printf '\n== %s\n' "$*"; }

ranks=2
case $(python -c 'import torch; print(torch.cuda.device_count())') in
0) mesh=(parallel.tp=2) device='two processes, gloo on the CPU, fp32' ;;
1) mesh=(parallel.tp=1 train.dtype=bfloat16) device='one process, one GPU, bf16' ranks=1 ;;
*) mesh=(parallel.tp=2 train.dtype=bfloat16) device='two processes, NCCL on two GPUs, bf16' ;;
esac
set -- "${mesh[@]}" "$@"
launch="python -m megalin"
((ranks == 1)) || launch="python -m torch.distributed.run --nproc-per-node $ranks -m megalin"
resolved=$(python -m megalin config "$config" "$@")
field() { sed -n "s/^$1 = //p" <<<"$resolved"; }
steps=$(field steps)

rm -rf "$run"
mkdir -p "$run"
bash "$here/data.sh" "$data" "$(field vocab_size)"

say "training: $device, first half"
$launch train "$config" --folder "$run" "$@" train.stop_after_steps=$((steps / 2))
say 'training: resuming from the checkpoint'
$launch train "$config" --folder "$run" "$@"

say 'evaluation: the same checkpoint without tensor parallelism'
$launch eval "$run" --json >"$run/evaluation.json"
say 'generation: a continuation of a prompt'
python -m megalin generate "$run" --prompt $'class Reader:\n    def' --max-tokens 100 --temperature 0.7 --top-p 0.9
python "$here/report.py" "$run"

python=$(realpath --no-symlinks --relative-to=. "$(command -v python)")
cat <<END

Try next:
  $python -m megalin generate $run --prompt 'import ' --temperature 0.8 --top-p 0.95
  $python -m megalin verify $config --world-size 4
  ${launch/#python/$python} train $config --folder runs/longer ${mesh[*]} train.steps=2000
END
