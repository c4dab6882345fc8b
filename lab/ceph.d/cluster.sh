# shellcheck shell=bash
# A complete Ceph cluster in one directory, from Debian's packages: a monitor, a manager, and storage
# daemons (OSDs) on sparse files. It listens on free ports of 127.0.0.1 only, needs no systemd, and
# changes nothing outside of its directory.

CEPH_PACKAGES="ceph-mon ceph-mon
ceph-osd ceph-osd
ceph-mgr ceph-mgr
rbd ceph-common"

need_ceph() {
    local tool package missing=()
    while read -r tool package; do
        command -v "$tool" >/dev/null || missing+=("$package")
    done <<<"$CEPH_PACKAGES"
    [[ ${#missing[@]} -eq 0 ]] || die "missing: apt-get install --no-install-recommends ${missing[*]}"
}

# Runs the command ceph as administrator of the cluster in $CLUSTER; returns even if the cluster does not answer.
ceph_admin() {
    limit 60 ceph --conf "$CLUSTER/ceph.conf" --connect-timeout 50 "$@"
}

rbd_admin() {
    limit 60 rbd --conf "$CLUSTER/ceph.conf" "$@"
}

# Prints the process of DAEMON (mon.a, osd.0, mgr.x) if it is running and not a zombie.
ceph_process() { # DAEMON
    local process
    process=$(cat "$CLUSTER/run/$1.pid" 2>/dev/null) || return 1
    # The process ID of a killed daemon may belong to another process now.
    tr '\0' ' ' 2>/dev/null <"/proc/$process/cmdline" | grep -qF -- "--conf $CLUSTER/ceph.conf " || return 1
    printf '%d\n' "$process"
}

ceph_has_exited() { # DAEMON
    ! ceph_process "$1" >/dev/null
}

# Finds two adjacent free ports, below the range that the kernel uses for connections.
free_ports() {
    "$PYTHON" - <<'END'
import random, socket
while True:
    port = random.randrange(20000, 32000)
    try:
        for each in (port, port + 1):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", each))
    except OSError:
        continue
    print(port)
    break
END
}

write_conf() { # AUTH PORT OSD-GIB
    # These settings are for the daemons, not for their clients.
    local own="run dir = $CLUSTER/run
pid file = $CLUSTER/run/\$name.pid
admin socket = $CLUSTER/run/\$name.asok
log file = $CLUSTER/log/\$name.log"
    cat >"$CLUSTER/ceph.conf" <<END
[global]
fsid = $(</proc/sys/kernel/random/uuid)
mon host = [v2:127.0.0.1:$2,v1:127.0.0.1:$(($2 + 1))]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = $1
auth service required = $1
auth client required = $1
keyring = $CLUSTER/\$name.keyring
crash dir = $CLUSTER/crash
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon allow pool delete = true
mon warn on pool no redundancy = false
mon data avail warn = 2
mon data avail crit = 1
mon osd min down reporters = 1
mgr initial modules =
mgr stats period = 2

[mon]
$own
mon data = $CLUSTER/\$name
mon cluster log file = $CLUSTER/log/cluster.log

[osd]
$own
osd data = $CLUSTER/\$name
keyring = $CLUSTER/\$name/keyring
osd memory target = 939524096
osd client watch timeout = 10
bluestore block size = $(($3 * 1024 * MIB))

[mgr]
$own
mgr data = $CLUSTER/\$name
keyring = $CLUSTER/\$name/keyring
END
}

# start_daemon DAEMON: starts it in the background, detached from this script's terminal.
start_daemon() {
    local kind=${1%%.*} id=${1#*.}
    limit 60 setsid "ceph-$kind" --conf "$CLUSTER/ceph.conf" -i "$id" >>"$CLUSTER/log/$1.out" 2>&1 </dev/null
}

make_keys() {
    local ring=$CLUSTER/mon.keyring admin=$CLUSTER/client.admin.keyring
    ceph-authtool --create-keyring "$ring" --gen-key -n mon. --cap mon 'allow *'
    ceph-authtool --create-keyring "$admin" --gen-key -n client.admin \
        --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
    ceph-authtool "$ring" --import-keyring "$admin"
}

# A monitor does not start if another process has taken its ports meanwhile.
make_monitor() { # AUTH OSD-GIB
    local attempt port keyring=()
    for attempt in {1..5}; do
        port=$(free_ports)
        write_conf "$1" "$port" "$2"
        rm -rf "$CLUSTER/mon.a" "$CLUSTER/monmap"
        if [[ $1 == cephx ]]; then
            make_keys
            keyring=(--keyring "$CLUSTER/mon.keyring")
        fi
        monmaptool --create --addv a "[v2:127.0.0.1:$port,v1:127.0.0.1:$((port + 1))]" \
            --fsid "$(sed -n 's/^fsid = //p' "$CLUSTER/ceph.conf")" "$CLUSTER/monmap"
        limit 60 ceph-mon --conf "$CLUSTER/ceph.conf" --mkfs -i a --monmap "$CLUSTER/monmap" "${keyring[@]}"
        ! start_daemon mon.a || return 0
        printf 'no monitor at port %d, attempt %d\n' "$port" "$attempt"
    done
    return 1
}

# daemon_key AUTH DAEMON CAPABILITY...
daemon_key() {
    [[ $1 == cephx ]] || return 0
    ceph_admin auth get-or-create "$2" "${@:3}" -o "$CLUSTER/$2/keyring"
}

make_osd() { # AUTH
    local id uuid
    uuid=$(</proc/sys/kernel/random/uuid)
    id=$(ceph_admin osd new "$uuid")
    mkdir "$CLUSTER/osd.$id"
    daemon_key "$1" "osd.$id" mon 'allow profile osd' mgr 'allow profile osd' osd 'allow *'
    limit 120 ceph-osd --conf "$CLUSTER/ceph.conf" -i "$id" --mkfs --osd-uuid "$uuid"
    start_daemon "osd.$id"
}

is_healthy() { # OSDS
    [[ $(ceph_admin osd stat --format json | json "j['num_up_osds']") == "$1" ]] &&
        ceph_admin mgr stat | grep -q '"available": true'
}

pools_are_clean() {
    local state
    state=$(ceph_admin pg stat)
    [[ $state =~ ^([0-9]+)\ pgs:\ ([0-9]+)\ active\+clean\; && ${BASH_REMATCH[1]} == "${BASH_REMATCH[2]}" ]]
}

make_pool() { # NAME
    ceph_admin osd pool create "$1" 8 8
    ceph_admin osd pool application enable "$1" rbd
}

# start_cluster DIRECTORY none|cephx OSDS OSD-GIB: with a pool `rbd`; with cephx, also the user client.blkq, with
# only the rights that RBD requires.
start_cluster() {
    local auth=$2 osds=$3 gib=$4 osd
    CLUSTER=$1
    mkdir -p "$CLUSTER"/{run,log,crash,mon.a,mgr.x}
    make_monitor "$auth" "$gib"
    for ((osd = 0; osd < osds; osd++)); do make_osd "$auth"; done
    daemon_key "$auth" mgr.x mon 'allow profile mgr' osd 'allow *'
    start_daemon mgr.x
    wait_for 120 is_healthy "$osds" || fail "the cluster is not up: see $CLUSTER/log"
    make_pool rbd
    wait_for 60 pools_are_clean || fail "the pool is not clean: see $CLUSTER/log"
    [[ $auth != cephx ]] || ceph_admin auth get-or-create client.blkq mon 'profile rbd' \
        osd 'profile rbd' mgr 'profile rbd' -o "$CLUSTER/client.blkq.keyring"
}

ceph_daemons() {
    local file
    for file in "$CLUSTER"/run/*.pid; do
        [[ ! -e $file ]] || basename "$file" .pid
    done
}

# kill_daemon SIGNAL DAEMON...: returns when the daemons have exited.
kill_daemon() {
    local signal=$1 daemon process
    shift
    for daemon in "$@"; do
        process=$(ceph_process "$daemon") || continue
        kill "-$signal" "$process"
        wait_for 60 ceph_has_exited "$daemon"
    done
}

# The data of the cluster is discarded, so the daemons are killed and need not write it.
stop_cluster() { # DIRECTORY
    local daemons
    CLUSTER=$1
    mapfile -t daemons < <(ceph_daemons)
    kill_daemon KILL "${daemons[@]}"
    [[ ! -d $CLUSTER ]] || find "$CLUSTER" -mindepth 1 -delete
    rmdir -- "$CLUSTER" 2>/dev/null || true # fails if a tmpfs is mounted there
}
