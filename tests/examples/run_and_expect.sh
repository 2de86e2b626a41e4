#!/usr/bin/env bash
# run_and_expect.sh TEXT COMMAND...: fails if the command does, or if its output lacks TEXT.
set -euo pipefail
text=$1
shift
output=$("$@" 2>&1) || { status=$?; echo "$output"; echo "exit code $status"; exit "$status"; }
echo "$output"
grep -qF -- "$text" <<<"$output" || { echo "expected in the output: $text"; exit 1; }
