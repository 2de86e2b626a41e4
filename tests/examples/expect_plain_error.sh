#!/usr/bin/env bash
# expect_plain_error.sh TEXT PROGRAM...: each program must fail, say TEXT, and say it without libtorch's backtrace.
set -euo pipefail
text=$1
shift
for program in "$@"; do
    if output=$("$program" 2>&1); then echo "$program: expected a failure"; exit 1; fi
    grep -qF -- "$text" <<<"$output" || { echo "$output"; echo "$program: expected in the output: $text"; exit 1; }
    if grep -qE 'Exception raised from|frame #|terminate called' <<<"$output"; then
        echo "$output"
        echo "$program: expected no backtrace"
        exit 1
    fi
done
