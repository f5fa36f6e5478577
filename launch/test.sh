#!/usr/bin/env bash
# Makes the environment with test tools, then runs lint, types and the tests.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: bash launch/test.sh [--megatron VERSION] [pytest arguments]

Makes .venv with the test tools (see bash launch/environment.sh --help), then runs ruff, mypy and pytest, and stops at the
first that fails. Where nvcc is found, the CUDA kernel has to compile for all devices it is meant for.

Two tests run at a time, at most one of them with ranks and engines of its own. --numprocesses 0 runs one after the other,
as a debugger (--pdb) needs it.

  --megatron VERSION  test on this release of megatron-core instead of the installed one (in .venv/megatron-core/VERSION).
                      Those that want a newer Python are taken as well: their Python sources run on 3.11.

examples:
  bash launch/test.sh -m "not slow"
  bash launch/test.sh tests/unit/algorithms -k gae
  bash launch/test.sh --megatron 0.19.2 -m "not slow"
EOF
}

fail() {
    echo "test: $1" >&2
    exit 2
}

megatron="" pytest_arguments=()
while (($#)); do
    case $1 in
        --megatron)
            [[ ${2:-} =~ ^[0-9]+(\.[0-9]+)+ ]] || fail "--megatron needs a version such as 0.19.2, got '${2:-}'"
            megatron=$2
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) pytest_arguments+=("$1") ;;
    esac
    shift
done

# Prints the directory that holds megatron-core VERSION, fetched and unpacked once; a stopped fetch leaves no directory.
unpack_megatron() {
    local version=$1 directory=$PWD/.venv/megatron-core/$1
    if [[ ! -d $directory ]]; then
        local partial
        partial=$(mktemp -d .venv/megatron-core-XXXXXX)
        # Wheels of the later releases are marked for Python 3.12 and up.
        .venv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: \
            --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
            --dest "$partial" "megatron-core==$version" >&2 || {
            rm -rf "$partial"
            fail "could not fetch megatron-core $version; see pip's message above"
        }
        .venv/bin/python -m zipfile -e "$partial"/*.whl "$partial/unpacked"
        mkdir -p .venv/megatron-core
        mv "$partial/unpacked" "$directory"
        rm -rf "$partial"
    fi
    echo "$directory"
}

# Compiles the CUDA kernel for these compute capabilities and keeps nothing; a warning is an error.
compile_kernel() {
    local targets=() target
    for target in "$@"; do
        targets+=("--generate-code=arch=compute_$target,code=sm_$target")
    done
    echo "test: CUDA kernel, for compute capabilities $*"
    compiled=$(mktemp)
    trap 'rm -f "$compiled"' EXIT
    nvcc -O3 -std=c++17 -Xcompiler=-fPIC --threads=0 --Werror=all-warnings "${targets[@]}" --compile \
        rlmegatron/weight_sync/csrc/copy_segments.cu -o "$compiled"
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/environment.sh --test
if [[ -n $megatron ]]; then
    directory=$(unpack_megatron "$megatron")
fi

echo "test: lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
echo "test: types"
.venv/bin/mypy
if command -v nvcc >/dev/null; then
    compile_kernel 80 90 100
fi
if [[ -n $megatron ]]; then
    export PYTHONPATH=$directory${PYTHONPATH:+:$PYTHONPATH}
    found=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("megatron-core"))')
    [[ $found == "$megatron" ]] || fail "asked for megatron-core $megatron, but Python finds $found"
    echo "test: megatron-core $found"
fi
echo "test: pytest"
.venv/bin/python -m pytest --numprocesses 2 --max-worker-restart 0 ${pytest_arguments[@]+"${pytest_arguments[@]}"}
