# shellcheck shell=bash
# What the tests in guests share: file trees, file systems, devices of the kernel.

# shellcheck source-path=SCRIPTDIR source=../lib.sh
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/../lib.sh"

# A tree of files of all sizes around a page and a block, links and a hole: make_tree PATH
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
    for number in {1..60}; do
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

# Mounts on $SCRATCH/mnt; a step that fails unmounts, so that the next one can use the device.
mount_here() { # MOUNT-ARGUMENT...
    mkdir -p "$SCRATCH/mnt"
    trap 'umount "$SCRATCH/mnt"' EXIT
    mount "$@" "$SCRATCH/mnt"
}

unmount_here() {
    umount "$SCRATCH/mnt"
    trap - EXIT
}

# The file system's whole life: made, filled, unmounted, checked, mounted again, compared.
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

# The same tree, seen through the kernel's own loop device on the image.
tree_in_image() { # IMAGE
    mount_here -o loop,ro "$1"
    same_tree "$SCRATCH/tree" "$SCRATCH/mnt/tree"
    unmount_here
}

allocated_mib() { # IMAGE
    sync "$1"
    printf '%d\n' $(($(stat -c '%b * %B' "$1") / MIB))
}

# Free space that was written once is given back to the image: trim_shrinks DEVICE IMAGE
trim_shrinks() {
    local before after
    make_file_system ext4 "$1" -E nodiscard
    mount_here "$1"
    random_file "$SCRATCH/mnt/ballast" $((64 * MIB))
    sync -f "$SCRATCH/mnt"
    before=$(allocated_mib "$2")
    rm "$SCRATCH/mnt/ballast"
    sync -f "$SCRATCH/mnt" # freed blocks are free when the journal says so
    fstrim -v "$SCRATCH/mnt"
    unmount_here
    after=$(allocated_mib "$2")
    printf 'allocated: %d MiB, after the trim %d MiB\n' "$before" "$after"
    [[ $before -ge 64 && $after -le $((before - 60)) ]]
    check_file_system ext4 "$1"
}

# Random writes of many sizes, each block verified: fio_verify DEVICE [OPTION...]
fio_verify() {
    fio --name=verify --filename="$1" --ioengine=libaio --direct=1 --rw=randwrite --bsrange=4k-128k \
        --iodepth=32 --size=48m --verify=crc32c --verify_fatal=1 --randseed=7 --minimal --output=/dev/null "${@:2}"
}
