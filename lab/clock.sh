# shellcheck shell=bash
# Limits that follow the machine: a second of theirs is a second on an idle machine of the speed
# that they were chosen on, and longer where processors are slower or shared with others. So a
# limit finds what hangs, and never fails what is only slow.

# The time of a turn of an empty loop in bash on such a machine, in nanoseconds. An emulated guest
# has its own number (lab/guest).
LAB_LOOP_NS=${LAB_LOOP_NS:-2000}
CLOCK_LOOPS=1000
# The most by which a second is stretched, in percent.
CLOCK_SLOWNESS_MAX=1000
CLOCK_PROCESSORS=$(nproc)

# How much slower this machine is just now, in percent, in SLOWNESS: what a fixed piece of work
# takes, times the number of those that want each processor.
measure_slowness() {
    local begin_us load turn
    begin_us=${EPOCHREALTIME/./}
    for ((turn = 0; turn < CLOCK_LOOPS; turn++)); do :; done
    SLOWNESS=$(((${EPOCHREALTIME/./} - begin_us) * 100000 / (CLOCK_LOOPS * LAB_LOOP_NS)))
    [[ $SLOWNESS -ge 100 ]] || SLOWNESS=100
    read -r load _ </proc/loadavg
    load=$((10#${load/./} / CLOCK_PROCESSORS))
    [[ $load -le 100 ]] || SLOWNESS=$((SLOWNESS * load / 100))
    [[ $SLOWNESS -le $CLOCK_SLOWNESS_MAX ]] || SLOWNESS=$CLOCK_SLOWNESS_MAX
}

# Returns when SECONDS of the machine have passed, or after PROCESS has exited:
# machine_sleep SECONDS PROCESS
machine_sleep() {
    local left_us=$(($1 * 1000000)) never
    exec {never}<> <(:) # a pipe on which nothing arrives: no process is started to sleep
    while [[ $left_us -gt 0 && -d /proc/$2 ]]; do
        read -rt 1 -u "$never" || true
        measure_slowness
        left_us=$((left_us - 100000000 / SLOWNESS))
    done
}

# limit SECONDS COMMAND...: as timeout(1), in seconds of the machine; 124 if they are over. A
# subshell, so that the caller's $! stays what it was.
limit() (
    seconds=$1 code=0
    shift
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'kill $process $clock 2>/dev/null || true' EXIT
    # SIGALRM makes it believe that its time is over. A time of its own is for when nothing is left
    # to send that.
    timeout --kill-after=20 $((seconds * CLOCK_SLOWNESS_MAX / 100 + 60)) "$@" <&0 &
    process=$!
    {
        machine_sleep "$seconds" "$process"
        kill -ALRM "$process"
    } </dev/null >/dev/null 2>&1 &
    clock=$!
    wait "$process" 2>/dev/null || code=$?
    process=''
    exit "$code"
)
