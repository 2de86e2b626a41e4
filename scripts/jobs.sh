#!/bin/sh
# Prints how many compilers may run at once: one per core, but each needs about 2 GiB of memory.
cores=$(nproc)
memory=$(awk '/^MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo)
limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || echo max)
if [ "$limit" != max ] && [ $((limit / 2147483648)) -lt "$memory" ]; then
    memory=$((limit / 2147483648))
fi
[ "$memory" -lt "$cores" ] && cores=$memory
[ "$cores" -lt 1 ] && cores=1
echo "$cores"
