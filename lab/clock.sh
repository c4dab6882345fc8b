# shellcheck shell=bash
# Time limits that follow the machine: a second is a second on an idle reference machine, and longer
# where processors are slower or shared. So a limit detects a hang, and does not fail a step that is
# only slow.

# The time of one iteration of an empty loop in bash on the reference machine, in nanoseconds. An
# emulated guest has another number (lab/guest).
LAB_LOOP_NS=${LAB_LOOP_NS:-2000}
CLOCK_LOOPS=1000
# The most by which a second is stretched, in percent.
CLOCK_SLOWNESS_MAX=1000
CLOCK_PROCESSORS=$(nproc)

# Sets SLOWNESS to the current slowness of this machine in percent: the time of a fixed piece of work,
# multiplied by the number of processes that compete for a processor.
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
    exec {never}<> <(:) # a pipe on which nothing arrives, so that no sleep process is needed
    while [[ $left_us -gt 0 && -d /proc/$2 ]]; do
        read -rt 1 -u "$never" || true
        measure_slowness
        left_us=$((left_us - 100000000 / SLOWNESS))
    done
}

# limit SECONDS COMMAND...: like timeout(1), in seconds of the machine; 124 if they have passed. Runs in
# a subshell, so that $! of the caller does not change.
limit() (
    seconds=$1 code=0
    shift
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'kill $process $clock 2>/dev/null || true' EXIT
    # SIGALRM makes timeout(1) believe that its time has passed. Its own limit applies if no process is left
    # to send the signal.
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
