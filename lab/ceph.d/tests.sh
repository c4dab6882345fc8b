# shellcheck shell=bash
# Tests of blkq's rbd driver with a real cluster, also while the cluster fails. Device and image are named after
# the test; the user is client.blkq, with keys.

# image NAME MIB [OPTION...]
image() {
    rbd_admin create --size "$2M" "$1" "${@:3}"
}

# serve NAME SPEC [OPTION...]: serves over NBD; sets SOCKET and URI.
serve() {
    attach "$1" "rbd:$2" --ceph-conf "$CLUSTER/ceph.conf" --ceph-user blkq "${@:3}"
    SOCKET=${URI#*socket=}
}

# refused TEXT COMMAND...: fails within two minutes, with one line that contains TEXT.
refused() {
    local text=$1 line
    shift
    if line=$(limit 120 "$@" 2>&1); then fail "not refused: $*: $line"; fi
    printf '%s\n' "$line"
    [[ $line == *"$text"* && $(wc -l <<<"$line") -eq 1 ]] || fail "not as expected: $*"
}

# not_served TEXT SPEC [OPTION...]
not_served() {
    refused "$1" "$BLKQ" attach "rbd:$2" --export nbd --ceph-conf "$CLUSTER/ceph.conf" --ceph-user blkq "${@:3}"
}

io() { # COMMAND...: of qemu-io
    local command commands=()
    for command in "$@"; do commands+=(-c "$command"); done
    limit 60 qemu-io -f raw -t none "${commands[@]}" "$URI"
}

io_fails() { # COMMAND
    if io "$1" >"$SCRATCH/io" 2>&1; then fail "it did not fail: $1"; fi
    cat "$SCRATCH/io"
}

logged() { # NAME PATTERN
    grep -E "$2" "$BLKQ_STATE_DIR/$1.log"
}

# Prints the bytes of an image as stored in the cluster.
content() { # SPEC
    rbd_admin export --no-progress "$1" -
}

# load BYTES: starts a client of $SOCKET that records what was answered, until `loaded`.
load() {
    rm -f "$SCRATCH"/load*
    limit 400 "$PYTHON" -B "$LAB/ceph.d/steady.py" "$SOCKET" "$1" "$SCRATCH/load" >"$SCRATCH/load.out" 2>&1 &
    LOAD=$!
    wait_for 30 load_proceeds
}

answered() {
    cat "$SCRATCH/load.answered" 2>/dev/null || printf '0\n'
}

# True if some hundred replies more have arrived since the first call.
load_proceeds() {
    if [[ ! -s $SCRATCH/load.from ]]; then answered >"$SCRATCH/load.from"; fi
    [[ $(answered) -gt $(($(<"$SCRATCH/load.from") + 100)) ]]
}

proceeds() { # SECONDS
    rm -f "$SCRATCH/load.from"
    wait_for "$1" load_proceeds
}

loaded() {
    local code=0
    touch "$SCRATCH/load"
    wait "$LOAD" || code=$?
    cat "$SCRATCH/load.out"
    equal "$code" 0 "exit code of the load"
}

# --- data

conforms() { # IMAGE-OPTION...
    local before
    image conforms 64 "$@"
    serve conforms rbd/conforms --sector-size 512
    "$LAB/conformance" "$URI" --size $((64 * MIB)) --sector 512 --no-sparse
    before=$(limit 60 nbdcopy "$URI" - | sha256sum)
    detach conforms
    no_leftovers
    equal "$(content rbd/conforms | sha256sum)" "$before" "the image, as rbd has it"
    rbd_admin rm --no-progress conforms
}

# map_is EXTENT...: checks the map of the device at $URI; an extent is LENGTH-IN-KIB:TYPE.
map_is() {
    equal "$(limit 60 nbdinfo --map "$URI" | awk '{ printf "%s%d:%s", sep, $2 / 1024, $3; sep = " " }')" "$*" "extents"
}

# Holes are reported: per object with fast-diff, per sector without. A cluster that does not answer delays no thread.
# Contract: data
sparse() {
    image sparse 64
    rbd_admin create --size 64M --image-feature layering,exclusive-lock plain
    serve sparse rbd/sparse
    map_is 65536:3
    io 'write -P 1 9M 64k' 'write -P 2 20M 8M'
    map_is 8192:3 4096:0 8192:3 8192:0 36864:3
    content rbd/sparse | cmp - <(limit 60 nbdcopy "$URI" -)
    io 'discard 20M 4M' 'write -z -u 24M 4M'
    map_is 8192:3 4096:0 53248:3
    detach sparse
    rbd_admin snap create --no-progress rbd/sparse@s
    rbd_admin snap protect rbd/sparse@s
    rbd_admin clone rbd/sparse@s rbd/clone
    serve clone rbd/clone
    io 'write -P 3 40M 4k'
    map_is 8192:3 4096:0 28672:3 4096:0 20480:3
    detach clone
    serve plain rbd/plain
    io 'write -P 1 8M 64k'
    map_is 8192:3 64:0 57280:3
    kill -STOP "$(ceph_process osd.0)"
    map_is 65536:0
    kill -CONT "$(ceph_process osd.0)"
    detach plain
    rbd_admin rm --no-progress clone
    rbd_admin snap unprotect rbd/sparse@s
    rbd_admin snap purge --no-progress rbd/sparse
    rbd_admin rm --no-progress sparse
    rbd_admin rm --no-progress plain
}

# Reads return data of other clients, and other clients read what was written here.
foreign_data() {
    random_file "$SCRATCH/random" $((32 * MIB)) 7
    rbd_admin import --no-progress "$SCRATCH/random" rbd/foreign
    serve foreign rbd/foreign
    limit 60 nbdcopy "$URI" - | cmp - "$SCRATCH/random"
    random_file "$SCRATCH/random" $((32 * MIB)) 8
    limit 60 nbdcopy --flush "$SCRATCH/random" "$URI"
    content rbd/foreign | cmp - "$SCRATCH/random" || fail "a flush left something behind"
    detach foreign
    rm "$SCRATCH/random"
}

killed() { # cached|uncached|exported KILLS
    local conf=$CLUSTER/ceph.conf books=$1 exports=()
    image killed 16
    if [[ $1 == exported ]]; then
        # The cluster's configuration enables the cache, and the export disables it.
        books=uncached exports=(--export vhost-user-blk)
    fi
    if [[ $1 == uncached ]]; then
        conf=$CLUSTER/uncached.conf
        { cat "$CLUSTER/ceph.conf" && printf '\n[client]\nrbd cache = false\n'; } >"$conf"
    fi
    "$PYTHON" -B "$LAB/ceph.d/kills.py" rbd:rbd/killed $((16 * MIB)) "$2" 1 "$books" --ceph-conf "$conf" --ceph-user blkq \
        "${exports[@]}"
    rbd_admin rm --no-progress killed
}

# Contract: data
snapshot() {
    image parent 16
    serve parent rbd/parent
    io 'write -P 1 0 16M' flush
    rbd_admin snap create --no-progress rbd/parent@before
    serve snapshot rbd/parent@before
    equal "$(nbdinfo --json "$URI" | grep -c '"is_read_only": true')" 1 "read-only"
    io_fails 'write -P 9 0 4k'
    local snapshot=$URI round
    attach_again parent
    for round in {2..6}; do
        limit 60 qemu-io -f raw -c "write -P $round 0 16M" -c flush "$URI" &
        limit 60 qemu-io -r -f raw -c 'read -P 1 0 16M' -c 'read -P 1 5M 4k' "$snapshot" >"$SCRATCH/io"
        if grep Pattern "$SCRATCH/io"; then fail "the snapshot changed"; fi
        wait $!
    done
    io 'read -P 6 0 16M'
    detach snapshot parent
    rbd_admin snap rm --no-progress rbd/parent@before
    rbd_admin rm --no-progress parent
}

# Prints the URI of a device that is already served.
attach_again() { # NAME
    URI="nbd+unix:///?socket=$BLKQ_STATE_DIR/$1.nbd"
}

namespace() {
    rbd_admin namespace create rbd/tenant
    image rbd/tenant/disk 16
    image disk 16
    serve tenant rbd/tenant/disk
    io 'write -P 3 0 1M' flush
    detach tenant
    equal "$(content rbd/tenant/disk | head -c 1 | od -An -tu1 | tr -d ' ')" 3 "in the namespace"
    equal "$(content rbd/disk | head -c 1 | od -An -tu1 | tr -d ' ')" 0 "beside it"
    rbd_admin rm --no-progress rbd/tenant/disk
    rbd_admin rm --no-progress disk
}

# --- what is refused

rejected_in_words() {
    image small 16
    not_served 'cannot open rbd:rbd/none: ' rbd/none
    not_served 'cannot open the pool none of rbd:none/small: ' none/small
    not_served 'cannot open rbd:rbd/small@none: ' rbd/small@none
    not_served 'cannot open rbd:rbd/none/small: ' rbd/none/small
    refused "cannot read the Ceph configuration $SCRATCH/none: " \
        "$BLKQ" attach rbd:rbd/small --export nbd --ceph-conf "$SCRATCH/none"
    refused 'cannot connect to the cluster as client.nobody: ' \
        "$BLKQ" attach rbd:rbd/small --export nbd --ceph-conf "$CLUSTER/ceph.conf" --ceph-user nobody
    rbd_admin rm --no-progress small
    no_leftovers
}

# Users with other rights: for another pool, and for reading only.
other_users() {
    make_pool other
    image rights 16
    ceph_admin auth get-or-create client.other mon 'profile rbd' osd 'profile rbd pool=other' -o "$CLUSTER/client.other.keyring"
    ceph_admin auth get-or-create client.reader mon 'profile rbd' osd 'profile rbd-read-only pool=rbd' -o "$CLUSTER/client.reader.keyring"
    refused 'Operation not permitted' \
        "$BLKQ" attach rbd:rbd/rights --export nbd --ceph-conf "$CLUSTER/ceph.conf" --ceph-user other
    attach rights rbd:rbd/rights --read-only --ceph-conf "$CLUSTER/ceph.conf" --ceph-user reader
    limit 60 qemu-io -r -f raw -c 'read -P 0 0 16M' "$URI"
    detach rights
    rbd_admin rm --no-progress rights
}

# --- one image, two writers

# Contract: exclusive
two_attaches() {
    image both 16
    serve both rbd/both
    io 'write -P 1 0 1M' flush
    not_served 'is locked by the client at ' rbd/both --name second
    io 'write -P 2 0 1M' flush
    detach both
    serve second rbd/both
    io 'read -P 2 0 1M' 'write -P 3 0 1M' flush
    detach second
    rbd_admin rm --no-progress both
}

# An administrator breaks the lock: the previous owner stops writing and reports the reason.
# Contract: errors, exclusive
stolen_lock() {
    local id locker address
    image stolen 16
    serve stolen rbd/stolen
    io 'write -P 1 0 16M' flush
    read -r locker id address < <(rbd_admin lock ls rbd/stolen --format json |
        "$PYTHON" -c 'import json, sys; (lock,) = json.load(sys.stdin); print(lock["locker"], lock["id"].replace(" ", "_"), lock["address"])')
    ceph_admin osd blocklist add "$address"
    rbd_admin lock rm rbd/stolen "${id//_/ }" "$locker"
    serve thief rbd/stolen
    io 'write -P 2 0 16M' flush
    attach_again stolen
    io_fails 'write -P 3 0 1M'
    "$BLKQ" show stolen | grep 'the cluster has blocklisted the address of this client'
    attach_again thief
    io 'read -P 2 0 16M'
    refused 'detached: data may be lost' "$BLKQ" detach stolen
    detach thief
    ceph_admin osd blocklist clear
    rbd_admin rm --no-progress stolen
}

# --- the next daemon

# dead_after SECONDS: sets the time after which the cluster considers a silent client dead.
dead_after() {
    limit 60 ceph --admin-daemon "$CLUSTER/run/osd.0.asok" config set osd_client_watch_timeout "$1" >/dev/null
}

# After an upgrade and a kill, the next daemon opens the image immediately, although the cluster considers the previous
# client alive for longer than an attach waits. The daemon needs no environment variables.
# Contract: exclusive, durability
replaced() {
    local begin_ms
    image replaced 16
    dead_after 300
    mkdir "$CLUSTER/elsewhere"
    sed '/^keyring/d' "$CLUSTER/ceph.conf" >"$CLUSTER/elsewhere/ceph.conf"
    cp "$CLUSTER/client.blkq.keyring" "$CLUSTER/elsewhere/own"
    CEPH_CONF=$CLUSTER/elsewhere/ceph.conf CEPH_KEYRING=$CLUSTER/elsewhere/own limit 20 \
        "$BLKQ" attach rbd:rbd/replaced --export nbd --export vhost-user-blk --ceph-user blkq
    attach_again replaced
    io 'write -P 1 0 1M'
    begin_ms=$(now_ms)
    limit 30 "$BLKQ" upgrade replaced
    printf '    upgraded in %s s\n' "$(seconds_since "$begin_ms")"
    io 'read -P 1 0 1M' 'write -P 2 0 1M' flush
    kill -9 "$(daemon_of replaced)"
    begin_ms=$(now_ms)
    limit 30 "$BLKQ" recover replaced
    printf '    recovered %s s after a kill\n' "$(seconds_since "$begin_ms")"
    io 'read -P 2 0 1M'
    detach replaced
    # Exited daemons do not delay it either.
    rbd_admin rm --no-progress replaced
    ceph_admin osd blocklist clear
    dead_after 10
    rm -r "$CLUSTER/elsewhere"
}

# --- sizes

size_is() { # NAME MIB
    [[ $(nbdinfo --size "$URI") == $(($2 * MIB)) ]]
}

# Contract: live-changes
resized() {
    image resized 16
    serve resized rbd/resized
    rbd_admin resize --no-progress --size 32M rbd/resized
    wait_for 20 size_is resized 32 || fail "the device does not grow with the image"
    io 'write -P 5 31M 1M' 'read -P 5 31M 1M'
    rbd_admin resize --no-progress --size 8M --allow-shrink rbd/resized
    wait_for 20 size_is resized 8 || fail "the device does not shrink with the image"
    io 'read 7M 1M'
    detach resized
    rbd_admin rm --no-progress resized
}

# --- the cluster fails

# Contract: complete, durability
osd_killed() {
    image osd 32
    serve osd rbd/osd --hang-warning 1
    load $((32 * MIB))
    kill_daemon KILL osd.0
    wait_for 30 logged osd ' hang: .* waiting for the cluster of rbd:rbd/osd'
    start_daemon osd.0
    proceeds 120 || fail "I/O does not resume"
    loaded
    logged osd ' hang over: '
    detach osd
    no_leftovers
    rbd_admin rm --no-progress osd
}

# A pool with two copies, of which one is sufficient: an OSD is killed permanently, and I/O continues with the other.
# Contract: complete, durability
osd_lost() {
    local -x CLUSTER=$SCRATCH/two
    start_cluster "$CLUSTER" none 2 4
    ceph_admin osd pool set rbd size 2
    ceph_admin osd pool set rbd min_size 1
    wait_for 60 pools_are_clean
    image lost 32
    attach lost rbd:rbd/lost --ceph-conf "$CLUSTER/ceph.conf"
    SOCKET=${URI#*socket=}
    load $((32 * MIB))
    kill_daemon KILL osd.0
    proceeds 120 || fail "I/O does not resume"
    loaded
    detach lost
    no_leftovers
    stop_cluster "$CLUSTER"
}

# Contract: complete
monitors_stopped() {
    image monitors 32
    serve monitors rbd/monitors
    load $((32 * MIB))
    kill -STOP "$(ceph_process mon.a)"
    proceeds 30 || fail "I/O waits for a monitor"
    not_served 'the cluster did not answer within 60 seconds (step: connecting to the monitors)' rbd/none
    kill -CONT "$(ceph_process mon.a)"
    kill_daemon KILL mon.a
    proceeds 30 || fail "I/O waits for a monitor"
    start_daemon mon.a
    proceeds 30
    loaded
    detach monitors
    no_leftovers
    wait_for 60 rbd_admin rm --no-progress monitors
}

# The device detaches when the cluster answers; until then `detach --force` waits for a minute. The OSD is killed, not
# stopped: an OSD whose clock was stopped for longer than its read lease may let clients of a pool with one
# replica wait forever ("laggy" in `ceph status`).
# Contract: complete, detach
dead_cluster() {
    local begin_ms
    image dead 16
    serve dead rbd/dead --hang-warning 1
    load $((16 * MIB))
    kill_daemon KILL mon.a osd.0
    wait_for 30 logged dead ' hang: .* waiting for the cluster of rbd:rbd/dead'
    refused 'connected' "$BLKQ" detach dead
    begin_ms=$(now_ms)
    if limit 90 "$BLKQ" detach dead --force 2>"$SCRATCH/reason"; then fail "detached"; fi
    cat "$SCRATCH/reason"
    grep -q 'still waiting for [0-9]* requests in flight' "$SCRATCH/reason"
    printf '    detach --force stopped waiting after %s s\n' "$(seconds_since "$begin_ms")"
    start_daemon mon.a
    start_daemon osd.0
    if ! wait_for 90 no_leftovers >/dev/null; then
        tail -n 5 "$BLKQ_STATE_DIR/dead.log"
        ceph_admin status
        fail "the device does not detach"
    fi
    touch "$SCRATCH/load"
    wait "$LOAD" || true
    wait_for 60 rbd_admin rm --no-progress dead
}

# Contract: complete, errors
full_pool() {
    make_pool small
    image small/full 32
    serve full small/full --hang-warning 1
    ceph_admin osd pool set-quota small max_bytes $((4 * MIB))
    load $((32 * MIB))
    wait_for 90 logged full ' hang: |full|space' || fail "the quota does nothing"
    ceph_admin osd pool set-quota small max_bytes 0
    proceeds 90 || fail "I/O does not resume"
    loaded
    detach full
    ceph_admin osd pool rm small small --yes-i-really-really-mean-it
}

# rbd does not remove an image in use; ceph removes its pool.
removed() {
    make_pool doomed
    image doomed/gone 16
    serve gone doomed/gone
    io 'write -P 1 0 1M' flush
    if rbd_admin rm --no-progress doomed/gone; then fail "removed in use"; fi
    io 'read -P 1 0 1M'
    ceph_admin osd pool rm doomed doomed --yes-i-really-really-mean-it
    wait_for 30 io_fails 'write -P 2 0 1M'
    limit 60 "$BLKQ" detach gone --force || true
    wait_for 60 no_leftovers >/dev/null || fail "the daemon is left"
}

# --- over ublk and vhost-user-blk

# The ports of the monitor and the OSDs.
ports() {
    ceph_admin osd dump | grep -oE '127\.0\.0\.1:[0-9]+' | cut -d: -f2
    grep -oE '127\.0\.0\.1:[0-9]+' "$CLUSTER/ceph.conf" | cut -d: -f2
}

# Runs in a guest, because this kernel has no ublk driver. The guest reaches the ports of the cluster and the other
# ports of this machine through QEMU's user network.
over_ublk() {
    local ports
    image guest 300
    mapfile -t ports < <(ports | sort -u)
    "$LAB/guest" run --timeout 400 --memory 1024 --qemu "-netdev user,id=net -device virtio-net-pci,netdev=net,romfile=" \
        rbd "$CLUSTER" blkq rbd/guest "${ports[@]}"
    wait_for 60 rbd_admin rm --no-progress guest
}

# The conformance tests with QEMU as front end, which serves the disk over NBD. What QEMU does not support is
# omitted, as in lab/matrix.
over_vhost() {
    local disk front_end
    image vhost 64
    disk=$(limit 20 "$BLKQ" attach rbd:rbd/vhost --export vhost-user-blk --sector-size 512 \
        --ceph-conf "$CLUSTER/ceph.conf" --ceph-user blkq)
    [[ $disk == vhost-user:/* ]] || fail "attach printed: $disk"
    become_blkio qemu-nbd -t -e 20 -k "$SCRATCH/front-end" --image-opts "$(blkio_disk "${disk#vhost-user:}")" \
        >"$SCRATCH/qemu-nbd.log" 2>&1 &
    front_end=$!
    wait_for 30 test -S "$SCRATCH/front-end"
    "$LAB/conformance" "nbd+unix:///?socket=$SCRATCH/front-end" --size $((64 * MIB)) --sector 512 \
        --lenient --no-sparse --no-zero-length --quick
    kill "$front_end"
    wait "$front_end" || true
    wait_for 10 detach vhost
    no_leftovers
    rbd_admin rm --no-progress vhost
}

# --- the daemon

# field NAME: prints the field of each thread of process $PID, without repetitions.
field() {
    sed -n "s/^$1:[[:space:]]*//p" /proc/"$PID"/task/*/status | sort -u | tr '\n' ' '
}

# librbd's threads keep the capability to read keyrings of another user; engines keep none.
confined() {
    local task name engines=0
    image confined 16
    serve confined rbd/confined
    PID=$(daemon_of confined)
    equal "$(field NoNewPrivs)" '1 ' NoNewPrivs
    equal "$(field Seccomp)" '2 ' Seccomp
    for name in CapInh CapAmb; do equal "$(field "$name")" '0000000000000000 ' "$name"; done
    for name in CapPrm CapEff CapBnd; do equal "$(field "$name")" '0000000000000000 0000000000000004 ' "$name"; done
    for task in "/proc/$PID" /proc/"$PID"/task/*; do
        [[ $(<"$task/comm") == blkq-queue* || $task != */task/* ]] || continue
        engines=$((engines + 1))
        grep -q '^CapPrm:[[:space:]]*0000000000000000$' "$task/status" || fail "$(<"$task/comm") has privileges"
    done
    equal "$engines" 2 "the first thread and an engine"
    detach confined
    rbd_admin rm --no-progress confined
}

is_attached() { # NAME
    "$BLKQ" show "$1" >/dev/null
}

# The client's threads make only the calls in the table of docs/security.md.
system_calls() {
    image calls 16
    limit 300 strace -f -qq -o "$SCRATCH/trace" "$BLKQ" attach rbd:rbd/calls --export nbd \
        --ceph-conf "$CLUSTER/ceph.conf" --ceph-user blkq &
    wait_for 60 is_attached calls
    attach_again calls
    io 'write 0 8M' flush 'read 0 8M' 'discard 0 4M' 'write -z -u 4M 4M'
    limit 60 nbdinfo --map "$URI" >/dev/null
    rbd_admin resize --no-progress --size 32M rbd/calls
    wait_for 60 size_is calls 32
    detach calls
    wait
    "$PYTHON" "$LAB/calls.py" --cluster "$ROOT/docs/security.md" "$SCRATCH/trace"
    rbd_admin rm --no-progress calls
}

# A machine without Ceph's library.
without_library() {
    local library
    library=$(ldconfig -p | sed -n 's/.*librbd\.so\.1 .* => //p' | head -n 1)
    # shellcheck disable=SC2016 # expanded by the inner shell
    refused 'librbd' unshare --mount bash -c 'mount --bind /dev/null "$0" && exec "$@"' "$(readlink -f "$library")" \
        "$BLKQ" attach rbd:rbd/any --export nbd --ceph-conf "$CLUSTER/ceph.conf"
}

# After a failed step, restarts the cluster for the next one.
clean_up() {
    local daemon
    for daemon in $(ceph_daemons); do
        kill -CONT "$(ceph_process "$daemon")" 2>/dev/null || start_daemon "$daemon"
    done
    limit 90 "$BLKQ" detach --all --force >/dev/null 2>&1
    daemons | xargs -r kill -9
}

case_of() { # NAME COMMAND...
    # shellcheck disable=SC2053 # ONLY is a pattern
    [[ $1 == $ONLY ]] || return 0
    local code
    step "$@"
    code=$?
    if [[ $code -eq 0 ]]; then grep -E '^    ' "$SCRATCH/step.log"; else clean_up; fi
}

all_tests() {
    case_of "conformance" conforms
    case_of "holes of a sparse image" sparse
    case_of "data of other clients" foreign_data
    case_of "kill -9 under load, librbd's cache on" killed cached 3
    case_of "kill -9 under load, librbd's cache off" killed uncached 2
    case_of "kill -9 under load, exported to a virtual machine" killed exported 3
    case_of "a snapshot, while its parent is written" snapshot
    case_of "a namespace" namespace
    case_of "wrong images are rejected in words" rejected_in_words
    case_of "users of other rights" other_users
    case_of "two attaches of one image" two_attaches
    case_of "a lock that is broken" stolen_lock
    case_of "the next daemon, after an upgrade and a kill" replaced
    case_of "the image is resized" resized
    case_of "an OSD is killed under load, and returns" osd_killed
    case_of "one of two OSDs is lost" osd_lost
    case_of "all monitors stopped, and killed" monitors_stopped
    case_of "the whole cluster dead: detach --force" dead_cluster
    case_of "a full pool" full_pool
    case_of "a removed image" removed
    case_of "over vhost-user-blk" over_vhost
    case_of "over ublk, in a guest" over_ublk
    case_of "privileges dropped" confined
    case_of "system calls of the client" system_calls
    case_of "a machine without librbd" without_library
}
