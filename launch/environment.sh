#!/usr/bin/env bash
# Makes .venv at the top of the repository and installs the pinned requirements; a finished environment is reused.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: bash launch/environment.sh [--test]

Makes .venv and installs rlmegatron (editable) with what it needs, pinned. The set for GPUs is taken where nvidia-smi
lists one, the one for CPUs elsewhere. An interrupted installation goes on where it stopped; a finished one is reused
until the pinned files change.

  --test              test tools too (pytest, ruff, mypy)

Environment variables:
  PYTHON              the interpreter to use (3.11 or newer); default: the first usable of python3.11, 3.12, 3.13, python3
  PIP_EXTRA_INDEX_URL and pip's other variables work as usual, for example for a CPU build of torch
EOF
}

# The message, and the exit code: 2 for a wrong command line, 1 for everything else.
fail() {
    echo "environment: $1" >&2
    exit "${2:-1}"
}

say() {
    echo "environment: $*"
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.11 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if is_new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python of version 3.11 or newer found (tried python3.11, python3.12, python3.13, python3); install one, or name it: PYTHON=/path/to/python3"
}

check_machine() {
    local compiler=${CXX:-c++}
    command -v "${compiler%% *}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
        fail "no C++ compiler found (tried ${compiler%% *}, g++, clang++); install one (Debian: apt-get install g++), or name it: CXX=/path/to/compiler"
    local free_gb
    free_gb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    ((free_gb >= need_gb)) || fail "$PWD has $free_gb GB free; the $kind set takes up to $need_gb GB"
}

# Repairs a half-made .venv too; leaves a whole one alone.
make_venv() {
    if [[ -x .venv/bin/python ]]; then
        is_new_enough .venv/bin/python ||
            fail ".venv has no working Python of version 3.11 or newer; remove .venv and start again"
        if .venv/bin/python -m pip --version >/dev/null 2>&1; then
            return
        fi
    fi
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments (no venv or ensurepip); install them (Debian: apt-get install python3-venv)"
    say "making .venv with $("$python" --version) ($python)"
    "$python" -m venv .venv || fail "could not make .venv; see the message above"
}

install() {
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$@" ||
        fail "pip install $* failed; see its message above. Run the same command again to go on"
}

install_cpu() {
    say "installing the CPU set, $(grep -c == launch/requirements-cpu.txt) pinned packages (one to three minutes)"
    install -r launch/requirements-cpu.txt
    install --no-deps -r launch/requirements-no-deps.txt
    install_package
    hook_torchvision
}

# torchvision's wheel is linked against CUDA and does not import beside a CPU build of torch, and transformers imports it
# with every model. A .pth file runs at the start of each Python of this environment; it must not import the package,
# which another checkout may be about to import from elsewhere.
hook_torchvision() {
    local site
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp rlmegatron/platform/torchvision_ops.py "$site/rlmegatron_torchvision.py"
    echo 'import rlmegatron_torchvision; rlmegatron_torchvision.install_torchvision_hook()' \
        >"$site/rlmegatron_torchvision.pth"
}

install_gpu() {
    say "installing the GPU set; Transformer Engine is compiled here, which takes a while"
    install -r launch/requirements-gpu.txt
    # Its torch part has no wheel and is built against the torch just installed.
    install --no-build-isolation -r launch/requirements-gpu-build.txt
    install_package
}

# A library that does not build is no failure to pip, whose warning -qq hides.
install_package() {
    local command=(--no-deps --no-build-isolation --editable .) devices=(cpu) device
    install "${command[@]}"
    if command -v nvcc >/dev/null; then
        devices+=(cuda)
    fi
    for device in "${devices[@]}"; do
        [[ -f rlmegatron/weight_sync/csrc/libcopy_segments_$device.so ]] ||
            say "the library that copies weights on $device did not build, so that torch will copy them, slower;" \
                "to see why: .venv/bin/python -m pip install --verbose ${command[*]}"
    done
}

# What an installation depends on: the pinned files, the package's metadata, the sources that it compiles and with what,
# and where it lies.
fingerprint() {
    cat launch/requirements-*.txt setup.py rlmegatron/weight_sync/csrc/*.{h,cpp,cu} \
        <(echo "$kind $PWD ${CUDA_HOME:-} $(command -v nvcc)") | sha256sum | cut -d' ' -f1
}

is_ready() {
    [[ -f .venv/installed-$1 && $(<".venv/installed-$1") == "$wanted" ]] &&
        [[ $1 != "$kind" || -f rlmegatron/weight_sync/csrc/libcopy_segments_cpu.so ]]
}

# Runs install_NAME unless its stamp, written last, says that it has ended well with the same fingerprint.
stage() {
    if is_ready "$1"; then
        return
    fi
    rm -f ".venv/installed-$1"
    "install_$1"
    echo "$wanted" >".venv/installed-$1.partial"
    mv ".venv/installed-$1.partial" ".venv/installed-$1"
    say "the $1 set is ready ($SECONDS s)"
}

install_test() {
    say "installing the test tools"
    install -r launch/requirements-test.txt
}

main() {
    stages=()
    while (($#)); do
        case $1 in
            --test) stages=(test) ;;
            -h | --help)
                usage
                exit 0
                ;;
            *) fail "unknown argument '$1'; see bash launch/environment.sh --help" 2 ;;
        esac
        shift
    done
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    kind=cpu need_gb=4
    if command -v nvidia-smi >/dev/null && [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]]; then
        kind=gpu need_gb=30
    fi
    stages=("$kind" ${stages[@]+"${stages[@]}"})
    wanted=$(fingerprint)
    if ! is_complete; then
        build
    fi
}

is_complete() {
    local name
    for name in "${stages[@]}"; do
        is_ready "$name" || return 1
    done
    is_new_enough .venv/bin/python
}

build() {
    mkdir -p .venv
    exec 9>.venv/.lock
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "another installation is running here; waiting for it"
        flock 9
    fi
    check_machine
    make_venv
    local name
    for name in "${stages[@]}"; do
        stage "$name"
    done
}

main "$@"
