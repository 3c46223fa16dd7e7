#!/usr/bin/env bash
# Fetches gVisor's runsc, which Debian builds, into a cache folder, without changing the system. Needs apt and dpkg, no root.
# A runsc of one's own is named by RUNSC= or lies on the PATH, and nothing is fetched.
set -euo pipefail
# The last one built with the systrap platform for bookworm; the image format of checkpoints is that of this version.
version="0.0~20240729.0-4~bpo12+1"
suite="bookworm-backports"
mirror="${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
target="${XDG_CACHE_HOME:-$HOME/.cache}/everlong/gvisor"

skip() { printf 'gvisor: skipped, %s; sandbox.type = "gvisor" is not to be had\n' "$*" >&2; exit 0; }

[ -n "${RUNSC:-}" ] && { echo "gvisor: RUNSC names $RUNSC"; exit 0; }
[ -x "$target/runsc" ] && { echo "gvisor: $target/runsc is there"; exit 0; }
command -v runsc >/dev/null 2>&1 && { echo "gvisor: $(command -v runsc) is there"; exit 0; }
case "$(uname -s)-$(uname -m)" in Linux-x86_64 | Linux-aarch64) ;; *) skip "there is none for $(uname -s) on $(uname -m)" ;; esac
for program in apt-get dpkg-deb; do
    command -v "$program" >/dev/null 2>&1 || skip "expected $program, found none: install a runsc and name it by RUNSC="
done
key=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$key" ] || skip "$key is not there: install debian-archive-keyring"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/parts"
echo "deb [signed-by=$key] $mirror $suite main" >"$work/sources.list"
: >"$work/status"
# A configuration of its own: the system's sources, lists and package database stay as they are.
apt=(apt-get -q -o "Dir::Etc::SourceList=$work/sources.list" -o "Dir::Etc::SourceParts=$work/parts"
    -o "Dir::State=$work" -o "Dir::State::Lists=$work/lists" -o "Dir::State::Status=$work/status" -o "Dir::Cache=$work"
    -o "APT::Sandbox::User=$(id -un)")
"${apt[@]}" update >"$work/log" 2>&1 || skip "$suite cannot be had from $mirror: $(tail -n 2 "$work/log" | tr '\n' ' ')"
cd "$work"
"${apt[@]}" download "runsc=$version" >>"$work/log" 2>&1 ||
    "${apt[@]}" download runsc >>"$work/log" 2>&1 || skip "no runsc in $suite: $(tail -n 2 "$work/log" | tr '\n' ' ')"
dpkg-deb -x runsc_*.deb "$work/out"
mkdir -p "$target"
install -m 755 "$work/out/usr/bin/runsc" "$target/runsc.new"
mv "$target/runsc.new" "$target/runsc"
echo "gvisor: $("$target/runsc" --version | head -n 1) into $target"
