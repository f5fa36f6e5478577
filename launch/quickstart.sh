#!/usr/bin/env bash
# From a fresh clone to a model that RL has taught something: environment, tiny model and data, training, one line.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

presets() {
    local file
    for file in "$root"/yaml_configs/quickstart_*.yaml; do
        basename "$file" .yaml | sed 's/^quickstart_//'
    done
}

usage() {
    cat <<'EOF'
usage: bash launch/quickstart.sh [PRESET] [--seed N] [--resume] [section.key=value ...]

Teaches a model of a million parameters to sort digits (31431= -> 11334) with real Megatron-Core and SGLang, on two
processes of this machine's CPU or on two GPUs. Everything it needs is made on the first call: .venv (minutes), the
half-trained start (under a minute, runs/quickstart). Training then takes a few minutes. It ends with one line:

  quickstart: accuracy 0.NN -> 0.NN on N held-out problems, N steps, N s, run runs/quickstart_grpo

where the accuracy is that of greedy answers before and after, and the seconds are those of the training job.

  --seed N            seed of the start, the data and the run (default 1)
  --resume            go on with a run that was stopped; without it an earlier run is moved aside (RUN.1, RUN.2, ...)
  section.key=value   overrides of yaml_configs/quickstart_PRESET.yaml, for example train.steps=10

presets (default grpo):
EOF
    local preset
    for preset in $(presets); do
        # Line 2 of each file is a comment that says what it is.
        printf '  %-14s%s\n' "$preset" "$(sed -n '2s/^# //p' "$root/yaml_configs/quickstart_$preset.yaml")"
    done
    cat <<'EOF'

The run's directory holds the resolved config, metrics.jsonl, tensorboard/, rollouts/, checkpoints/ and export/.
docs/algorithms.md has the formulas; tools/sweep_quickstart.py runs all presets and compares them. See bash
launch/environment.sh --help for what is installed.
EOF
}

fail() {
    echo "quickstart: $1" >&2
    exit 2
}

preset=grpo seed=1 resume=false run="" overrides=()
while (($#)); do
    case $1 in
        --seed)
            [[ ${2:-} =~ ^[0-9]{1,18}$ ]] || fail "--seed needs a whole number of at most 18 digits, got '${2:-}'"
            seed=$((10#$2)) # without 10# a leading 0 makes it octal, and 08 an error
            shift
            ;;
        --resume) resume=true ;;
        -h | --help)
            usage
            exit 0
            ;;
        run_dir=?*) run=${1#run_dir=} ;;
        [a-z]*=*) overrides+=("$1") ;;
        *)
            known=$(presets | paste -sd ' ')
            [[ " $known " == *" $1 "* ]] || fail "unknown argument '$1'; presets are $known (--help says more)"
            preset=$1
            ;;
    esac
    shift
done
run=${run:-runs/quickstart_$preset}

cd "$root"
bash launch/environment.sh

variant=sort5 start=runs/quickstart
if [[ $preset == *_mixed ]]; then
    variant=mixed start=runs/quickstart_mixed
fi
if ((seed != 1)); then
    start+=_seed$seed
    overrides=(
        "seed=$seed" "model.path=$start/model" "data.train=[{path: $start/train.jsonl}]" "eval.sets.test=$start/test.jsonl"
        ${overrides[@]+"${overrides[@]}"}
    )
fi
.venv/bin/python tools/make_quickstart.py --out "$start" --seed "$seed" --variant "$variant"

settings=(--config "yaml_configs/quickstart_$preset.yaml" ${overrides[@]+"${overrides[@]}"} "run_dir=$run")
.venv/bin/python launch/train.py "${settings[@]}" --check --ranks 2 >/dev/null || exit

if [[ -e $run ]] && ! $resume; then
    number=1
    while [[ -e $run.$number ]]; do
        number=$((number + 1))
    done
    mv "$run" "$run.$number"
    echo "quickstart: moved the earlier run to $run.$number"
fi

began=$SECONDS
# --standalone finds a free port. One thread a process, which sleeps while it waits: the two of them and their engines
# share the machine's cores.
OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
    launch/train.py "${settings[@]}" || {
    code=$?
    echo "quickstart: training failed (exit code $code); what is left of the run lies in $run" >&2
    exit "$code"
}
.venv/bin/python tools/quickstart/report.py "$run" --seconds "$((SECONDS - began))"
