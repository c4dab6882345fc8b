# shellcheck shell=bash
# QEMU's tools with libblkio, a vhost-user-blk front end without a guest. They are Debian 13's, unpacked with
# the C library that they require, because Debian 12 has neither.

# shellcheck source-path=SCRIPTDIR source=guest.d/fetch.sh
. "$LAB/guest.d/fetch.sh"

make_blkio() { # DIRECTORY
    local package
    apt_of trixie apt-get update
    apt_of trixie apt-get install -y --download-only --no-install-recommends qemu-utils qemu-block-extra libblkio1
    for package in "$LAB_CACHE"/apt-trixie/archives/*.deb; do
        dpkg-deb -x "$package" "$1"
    done
    rm -r "$LAB_CACHE/apt-trixie"
    [[ -e $1/usr/lib/x86_64-linux-gnu/qemu/block-blkio.so ]]
}

fetch_blkio() {
    cached blkio make_blkio
}

# become_blkio TOOL ARGUMENT...: replaces this process by qemu-img, qemu-io or qemu-nbd. Use it in a background
# job or a subshell.
become_blkio() {
    local root=$LAB_CACHE/blkio tool=$1 libraries
    shift
    libraries=$root/usr/lib/x86_64-linux-gnu
    QEMU_MODULE_DIR=$libraries/qemu exec "$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$libraries" \
        "$root/usr/bin/$tool" "$@"
}

# The disk of SOCKET in the form of --image-opts.
blkio_disk() { # SOCKET
    printf 'driver=virtio-blk-vhost-user,path=%s,cache.direct=on,discard=unmap' "$1"
}

# front_end DISK SOCKET [QEMU-NBD-OPTION...]: QEMU uses the disk that attach printed, as for a guest, and serves it
# over NBD. Sets FRONT_END to its process and URI to its address.
front_end() {
    local disk=$1 socket=$2
    shift 2
    [[ $disk == vhost-user:/* ]] || fail "attach printed: $disk"
    disk=$(blkio_disk "${disk#vhost-user:}")
    [[ " $* " != *" -r "* ]] || disk+=,read-only=on
    become_blkio qemu-nbd -t -e 20 "$@" -k "$socket" --image-opts "$disk" >"$SCRATCH/qemu-nbd.log" 2>&1 &
    # shellcheck disable=SC2034 # used by scripts that source this file
    FRONT_END=$!
    wait_for 10 test -S "$socket"
    # shellcheck disable=SC2034
    URI="nbd+unix:///?socket=$socket"
}
