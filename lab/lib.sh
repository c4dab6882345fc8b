# shellcheck shell=bash disable=SC2034
# Shared by the scripts of the lab: tools, scratch space, timed and counted steps, and blkq.

LAB=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname -- "$LAB")
PYTHON=/usr/bin/python3 # Debian's Python, which has libnbd's bindings
MIB=$((1024 * 1024))

# shellcheck source-path=SCRIPTDIR source=clock.sh
. "$LAB/clock.sh"

# The blkq command under test: $BLKQ, or the release build.
BLKQ=${BLKQ:-${CARGO_TARGET_DIR:-$ROOT/target}/release/blkq}

PASSED=0
FAILED=0
FAILURES=()
LATE_PASSES=()
LEFT_OUT=()
CONCURRENT=()

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

wrong_usage() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

# need COMMAND...: fails if a tool is missing; no step is skipped silently.
need() {
    local tool missing=()
    for tool in "$@"; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [[ ${#missing[@]} -eq 0 ]] || die "missing: ${missing[*]} (run ./check, which installs them)"
}

need_blkq() {
    [[ -x $BLKQ ]] || die "no $BLKQ: run cargo build --release, or set BLKQ"
}

# A scratch directory. The trap removes it, after the script's processes and mounts.
scratch() {
    SCRATCH=$(mktemp -d "${LAB_DIR:-/var/tmp}/blkq-lab.XXXXXX")
    export BLKQ_STATE_DIR=$SCRATCH/state
    mkdir -m 700 "$BLKQ_STATE_DIR"
    trap finish EXIT
    trap 'exit 130' INT TERM
}

finish() {
    local mount process
    # A second signal, such as that of a script to its cases, must not end the cleaning.
    trap : INT TERM
    # What gather has not printed. First, because a step that took too long has few seconds left.
    cat "$SCRATCH"/concurrent.*.out 2>/dev/null
    [[ -x $BLKQ ]] && BLKQ_STATE_DIR=$SCRATCH/state limit 5 "$BLKQ" detach --all --force >/dev/null 2>&1
    daemons | xargs -r kill -9
    for process in $(jobs -p); do
        stop_with_children "$process"
    done
    [[ ${#CONCURRENT[@]} -eq 0 ]] || wait "${CONCURRENT[@]}" 2>/dev/null
    while read -r mount; do
        wait_for 20 umount "$mount"
    done < <(awk -v at="$SCRATCH/" 'index($2, at) == 1 { print $2 }' /proc/mounts)
    rm -rf -- "$SCRATCH"
}

# With the children, because a trap of bash runs only after the command that bash waits for.
stop_with_children() { # PROCESS
    local child children
    mapfile -t children < <(pgrep -P "$1" 2>/dev/null)
    kill "$1" 2>/dev/null
    for child in "${children[@]}"; do
        stop_with_children "$child"
    done
}

now_ms() {
    date +%s%3N
}

seconds_since() {
    local elapsed_ms=$(($(now_ms) - $1))
    printf '%d.%d' $((elapsed_ms / 1000)) $((elapsed_ms % 1000 / 100))
}

# Prints the seconds that NAME took in its last run, from $STEP_TIMES.
last_time() {
    [[ ! -s ${STEP_TIMES:-} ]] || awk -F '\t' -v name="$1" '$1 == name { seconds = $2 } END { print seconds }' "$STEP_TIMES"
}

keep_time() { # NAME SECONDS
    [[ ${STEP_TIMES:-} ]] || return 0
    {
        [[ ! -s $STEP_TIMES ]] || awk -F '\t' -v name="$1" '$1 != name' "$STEP_TIMES"
        printf '%s\t%s\n' "$1" "$2"
    } >"$SCRATCH/times" && mv "$SCRATCH/times" "$STEP_TIMES"
}

# On a terminal, shows the running step, its time so far, and the time of its last run.
show_progress() { # NAME BEGIN-MS
    local last
    last=$(last_time "$1")
    while sleep 1; do
        printf '\r  %-44s %7s s  ...%s' "$1" "$(seconds_since "$2")" "${last:+ (last time: $last s)}"
    done
}

# step NAME COMMAND...: runs COMMAND in a subshell that stops at the first failure; counts it. The log is $STEP_LOG.
# Never call it on the left of || or &&, or in an if: bash then ignores set -e, and failures with it.
step() {
    local name=$1 begin_ms code seconds progress='' log=${STEP_LOG:-$SCRATCH/step.log}
    shift
    (
        set -e
        false
        exit 42
    )
    [[ $? -ne 42 ]] || die "step $name is called where bash ignores set -e, and would pass whatever fails"
    begin_ms=$(now_ms)
    if [[ -t 1 ]]; then
        show_progress "$name" "$begin_ms" &
        progress=$!
    fi
    (
        set -eo pipefail
        "$@"
    ) >"$log" 2>&1 </dev/null
    code=$?
    if [[ $progress ]]; then
        kill "$progress"
        wait "$progress" 2>/dev/null
        printf '\r\e[K'
    fi
    seconds=$(seconds_since "$begin_ms")
    if [[ $code -eq 0 ]]; then
        step_passed "$name" "$seconds" "$log"
    else
        step_failed "$name" "$seconds" "$code" "$log"
    fi
    return "$code"
}

step_passed() { # NAME SECONDS LOG
    PASSED=$((PASSED + 1))
    printf '  %-44s %7s s  ok\n' "$1" "$2"
    grep -E '^    (left out|slow:|beside:|seeds:) ' "$3" | sed 's/^/  /' || true
    keep_time "$1" "$2"
}

step_failed() { # NAME SECONDS CODE LOG
    FAILED=$((FAILED + 1))
    FAILURES+=("$1")
    printf '  %-44s %7s s  FAIL (exit %d)\n' "$1" "$2" "$3"
    what_failed "$4" | sed 's/^/    > /'
    tail -n "${LAB_TAIL:-25}" "$4" | sed 's/^/      /'
}

# what_failed LOG: prints at most 12 lines of a step's log that name the failed test and its message. The kinds of
# failures: tests of Rust, compilers and linters, steps of the lab (FAIL), Python, scripts of the lab.
what_failed() {
    local found
    found=$(grep -aE -A 2 "^ *(TRY [0-9]+ )?(FAIL|SIGABRT|SIGSEGV|TIMEOUT) +\[|FAIL \(exit [0-9]+\)|panicked at |^error(\[|:)|^==[0-9]+== ?ERROR|^In .* line [0-9]+:|: failed: |^[A-Za-z]+(Error|Exception|Failure): |^Diff in |seed [0-9]+ failed" "$1" |
        grep -av '^--$' | awk '!seen[$0]++' | cut -c 1-200 | head -n 12)
    if [[ $found ]]; then
        printf '%s\n' "$found"
    else
        tail -n 3 "$1" | cut -c 1-200
    fi
}

# case_of NAME COMMAND...: a step whose processes and devices are removed if it fails.
case_of() {
    local code
    step "$@"
    code=$?
    [[ $code -eq 0 ]] || clean_up
}

# Removes what a failed step has left.
clean_up() {
    limit 20 "$BLKQ" detach --all --force >/dev/null 2>&1
    daemons | xargs -r kill -9
    wait_for 20 no_daemon || true
    find "$BLKQ_STATE_DIR" -mindepth 1 -delete
}

# concurrently COMMAND...: runs COMMAND, which calls step or counts as step does, in the background, with scratch and
# state directories of its own. At most one runs per processor. Only for steps that measure no times.
concurrently() {
    local own=$SCRATCH/concurrent.${#CONCURRENT[@]} running
    while mapfile -t running < <(jobs -rp) && [[ ${#running[@]} -ge $CLOCK_PROCESSORS ]]; do
        wait -n "${running[@]}"
    done
    in_own_directories "$own" "$@" >"$own.out" 2>&1 &
    CONCURRENT+=("$!")
}

# The process of concurrently, whose variables the script does not see.
in_own_directories() { # DIRECTORY COMMAND...
    SCRATCH=$1 BLKQ_STATE_DIR=$1/state PASSED=0 FAILED=0 FAILURES=() LEFT_OUT=() CONCURRENT=()
    trap finish EXIT
    trap 'exit 130' INT TERM
    mkdir "$1"
    mkdir -m 700 "$BLKQ_STATE_DIR"
    shift
    "$@"
    declare -p PASSED FAILED FAILURES LEFT_OUT >"$SCRATCH.counts"
}

# Waits for the commands of concurrently. Prints what they printed, in their order, and adds their counts.
gather() {
    local number own passed=$PASSED failed=$FAILED failures=("${FAILURES[@]}") omitted=("${LEFT_OUT[@]}")
    for number in "${!CONCURRENT[@]}"; do
        own=$SCRATCH/concurrent.$number
        wait "${CONCURRENT[number]}"
        cat "$own.out"
        PASSED=0 FAILED=1 FAILURES=("concurrent command $number, which was stopped") LEFT_OUT=()
        # declare would make the variables local here.
        [[ ! -s $own.counts ]] || eval "$(sed 's/^declare -[^ ]* //' "$own.counts")"
        passed=$((passed + PASSED)) failed=$((failed + FAILED))
        failures+=("${FAILURES[@]}") omitted+=("${LEFT_OUT[@]}")
        rm -f "$own.out" "$own.counts"
    done
    PASSED=$passed FAILED=$failed FAILURES=("${failures[@]}") LEFT_OUT=("${omitted[@]}") CONCURRENT=()
}

leave_out() {
    LEFT_OUT+=("$1")
}

# Prints the closing lines; the exit code is 0 if all steps passed.
verdict() {
    local reason
    for reason in "${LEFT_OUT[@]}"; do
        printf 'left out on purpose: %s\n' "$reason"
    done
    for reason in "${LATE_PASSES[@]}"; do
        printf 'passed at the second try: %s\n' "$reason"
    done
    # A reader of a long log sees its last lines first.
    for reason in "${FAILURES[@]}"; do
        printf 'failed: %s\n' "$reason"
    done
    printf '%d passed, %d failed\n' "$PASSED" "$FAILED"
    [[ $FAILED -eq 0 && $PASSED -gt 0 ]]
}

# equal ACTUAL EXPECTED WHAT
equal() {
    [[ $1 == "$2" ]] || {
        printf '%s: %q, want %q\n' "$3" "$1" "$2"
        return 1
    }
}

# fail TEXT: for use inside a step.
fail() {
    printf '%s\n' "$*"
    return 1
}

# json EXPRESSION: evaluates a Python expression over the document j on stdin.
json() {
    "$PYTHON" -c "import json, sys; j = json.load(sys.stdin); print($1)"
}

# random_file PATH BYTES [SEED]: a file of pseudo-random bytes, the same for the same seed
random_file() {
    head -c "$2" /dev/zero |
        openssl enc -aes-128-ctr -nosalt -pass "pass:${3:-1}" -pbkdf2 >"$1"
}

# wait_for SECONDS COMMAND...: waits until COMMAND succeeds; seconds of the machine (clock.sh).
wait_for() {
    local begin_ms stretch_ms=$(($1 * 10))
    shift
    begin_ms=$(now_ms)
    SLOWNESS=100
    until "$@" 2>/dev/null; do
        if [[ $(now_ms) -ge $((begin_ms + stretch_ms * SLOWNESS)) ]]; then
            measure_slowness # the time may be over only because the machine is slow
            [[ $(now_ms) -lt $((begin_ms + stretch_ms * SLOWNESS)) ]] || return 1
        fi
        sleep 0.02
    done
}

# Unmounts PATH as soon as nothing uses it: the kernel releases the files of a ring some time after its process
# has exited.
unmount() {
    wait_for 60 umount "$1" || fail "$1 is in use"
}

# attach NAME IMAGE [OPTION...]: serves over NBD; sets URI.
attach() {
    local name=$1 image=$2
    shift 2
    URI=$(limit 20 "$BLKQ" attach "$image" --name "$name" --export nbd "$@") || return
    [[ $URI == nbd* ]] || fail "attach printed: $URI"
}

detach() {
    limit 30 "$BLKQ" detach "$@"
}

daemon_of() { # NAME
    "$BLKQ" show "$1" --json | sed -n 's/.*"pid":\([0-9]*\).*/\1/p'
}

# Prints the processes that serve devices of this lab's state directory.
daemons() {
    local process
    while read -r process; do
        if grep -qzxF "BLKQ_STATE_DIR=$BLKQ_STATE_DIR" "/proc/$process/environ"; then
            printf '%s\n' "$process"
        fi
    done 2>/dev/null < <(find /proc -maxdepth 2 -path '/proc/[0-9]*/exe' \
        -lname "$(readlink -f "$BLKQ")" -printf '%h\n' 2>/dev/null | sed 's|/proc/||')
}

no_daemon() {
    [[ -z $(daemons) ]]
}

# resume_until_exited NAME PROCESS: resumes a device until PROCESS, which waits for held requests, has exited
resume_until_exited() {
    wait_for 200 exits_when_resumed "$@" || fail "process $2 still waits for $1"
}

exits_when_resumed() {
    "$BLKQ" resume "$1" >/dev/null
    ! kill -0 "$2" 2>/dev/null
}

# A detached device has left nothing but a directory for journals of images.
no_leftovers() {
    equal "$(find "$BLKQ_STATE_DIR" -mindepth 1 ! -path "$BLKQ_STATE_DIR/journals" -printf '%P ')" "" "left in the state directory"
    equal "$(daemons)" "" "processes left"
}
