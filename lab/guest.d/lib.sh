# shellcheck shell=bash
# Shared by the tests in guests: file trees, file systems, devices of the kernel.

# Paths are relative to the root; SCRIPTDIR is the directory of the checked script, a test, whose ../lib.sh is this.
# shellcheck source=lab/lib.sh
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib.sh"

# choose [ublk|nbd] [PATTERN]: the export of the kernel's block devices, ublk or nbd with the kernel's client, and
# the steps to run
choose() {
    EXPORT=${1:-ublk}
    ONLY=${2:-*}
    case $EXPORT in
    ublk) modprobe ublk_drv ;;
    nbd) modprobe nbd nbds_max=2 max_part=8 && need nbd-client ;;
    *) wrong_usage "ublk or nbd, not $EXPORT" ;;
    esac
}

chosen_step() { # NAME COMMAND...
    # shellcheck disable=SC2053 # ONLY is a pattern
    [[ $1 != $ONLY ]] || step "$@"
}

# serve IMAGE [ATTACH-OPTION...]: makes IMAGE a block device of the kernel, in DEVICE, for the rest of the step.
# The device has the name of the file, or of the driver.
serve() {
    local name=${1##*/}
    name=${name%%:*}
    trap clean_up EXIT
    if [[ $EXPORT == nbd ]]; then
        attach "$name" "$@"
        DEVICE=/dev/nbd0
        nbd-client -unix "$BLKQ_STATE_DIR/$name.nbd" "$DEVICE" -C 2
    else
        DEVICE=$(limit 60 "$BLKQ" attach "$@" --name "$name" --export ublk)
        [[ $DEVICE == /dev/ublkb* ]] || fail "attach printed: $DEVICE"
    fi
    [[ -b $DEVICE ]] || fail "no $DEVICE"
    KERNEL_LINES=$(dmesg | wc -l)
}

# The kernel has logged no I/O error of DEVICE since it was attached.
no_io_errors() {
    if dmesg | tail -n "+$((KERNEL_LINES + 1))" | grep -E "error, dev ${DEVICE##*/},"; then
        fail "errors reached the kernel"
    fi
}

unserve() { # NAME
    if [[ $EXPORT == nbd ]]; then
        nbd-client -d "$DEVICE"
        wait_for 10 disconnected
    fi
    detach "$1"
    no_leftovers
    [[ $EXPORT == nbd || ! -e $DEVICE ]] || fail "$DEVICE is still there"
}

disconnected() {
    ! nbd-client -c "$DEVICE"
}

# After a step, passed or failed: nothing is mounted, nothing is attached.
clean_up() {
    local process
    for process in $(jobs -p); do
        kill "$process" 2>/dev/null
    done
    ! mountpoint -q "$SCRATCH/mnt" || umount "$SCRATCH/mnt"
    [[ $EXPORT != nbd ]] || disconnected || nbd-client -d "$DEVICE"
    limit 60 "$BLKQ" detach --all --force
}

# image SIZE: creates an empty image of SIZE, in IMAGE
image() {
    IMAGE=$SCRATCH/image
    rm -f "$IMAGE"
    truncate -s "$1" "$IMAGE"
}

# Prints 6012 for 6.12.
kernel_version() {
    uname -r | awk -F. '{ print $1 * 1000 + $2 }'
}

queue_limit() { # NAME
    cat "/sys/block/${DEVICE##*/}/queue/$1"
}

# make_tree PATH: files of all sizes around a page and a block, links and a hole
make_tree() {
    local size number=0
    mkdir -p "$1"/{empty,deep/er/still}
    random_file "$SCRATCH/tree.bytes" $((4 * MIB)) tree
    for size in 1 511 512 513 4095 4096 4097 65535 65536 1000000 4194304; do
        for _ in 1 2 3; do
            number=$((number + 1))
            head -c "$size" "$SCRATCH/tree.bytes" >"$1/deep/file-$number"
        done
    done
    for number in {1..40}; do
        printf 'file %d\n' "$number" >"$1/deep/er/still/$number"
    done
    ln -s deep/file-1 "$1/symbolic"
    ln "$1/deep/file-2" "$1/hard"
    truncate -s 8M "$1/hole"
    rm "$SCRATCH/tree.bytes"
}

same_tree() { # EXPECTED ACTUAL
    diff -r --no-dereference --exclude=lost+found "$1" "$2"
    equal "$(cd "$2" && stat -c '%a %h' hard symbolic)" "$(cd "$1" && stat -c '%a %h' hard symbolic)" \
        "modes and links"
}

make_file_system() { # KIND DEVICE [OPTION...]
    case $1 in
    ext4) mkfs.ext4 -qF "${@:3}" "$2" ;;
    xfs) mkfs.xfs -qf "${@:3}" "$2" ;;
    btrfs) mkfs.btrfs -qf "${@:3}" "$2" ;;
    esac
}

check_file_system() { # KIND DEVICE
    case $1 in
    ext4) e2fsck -fn "$2" ;;
    xfs) xfs_repair -n "$2" ;;
    btrfs) btrfs check "$2" ;;
    esac
}

# Mounts on $SCRATCH/mnt; a step that fails unmounts it for the next step.
mount_here() { # MOUNT-ARGUMENT...
    mkdir -p "$SCRATCH/mnt"
    trap clean_up EXIT
    mount "$@" "$SCRATCH/mnt"
}

unmount_here() {
    umount "$SCRATCH/mnt"
}

# The life cycle of a file system: created, filled, unmounted, checked, mounted again, compared.
file_system() { # KIND DEVICE
    local kind=$1 device=$2
    make_file_system "$kind" "$device"
    mount_here -t "$kind" "$device"
    cp -a "$SCRATCH/tree" "$SCRATCH/mnt/"
    unmount_here
    check_file_system "$kind" "$device"
    mount_here -t "$kind" "$device"
    same_tree "$SCRATCH/tree" "$SCRATCH/mnt/tree"
    unmount_here
}

# Compares the tree as seen through the kernel's loop device on the image.
tree_in_image() { # IMAGE
    mount_here -o loop,ro "$1"
    same_tree "$SCRATCH/tree" "$SCRATCH/mnt/tree"
    unmount_here
}

allocated_mib() { # IMAGE
    sync "$1"
    printf '%d\n' $(($(stat -c '%b * %B' "$1") / MIB))
}

# fio_verify DEVICE [OPTION...]: random writes of many sizes, each block verified
fio_verify() {
    fio --name=verify --filename="$1" --ioengine=libaio --direct=1 --rw=randwrite --bsrange=4k-128k \
        --iodepth=32 --size=16m --verify=crc32c --verify_fatal=1 --randseed=7 --minimal --output=/dev/null "${@:2}"
}
