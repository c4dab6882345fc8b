# shellcheck shell=bash
# QEMU's tools with libblkio, a front end of vhost-user-blk without a guest: Debian 13's, unpacked with
# the C library that they want, as Debian 12 has neither.

# shellcheck source-path=SCRIPTDIR source=guest.d/fetch.sh
. "$LAB/guest.d/fetch.sh"

apt_trixie() { # COMMAND ARGUMENT...: as if nothing was installed here
    local apt=$LAB_CACHE/apt-trixie command=$1
    shift
    mkdir -p "$apt/state/lists/partial" "$apt/archives/partial"
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s/debian trixie main\n' "$DEBIAN" \
        >"$apt/sources.list"
    "$command" -qq -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State="$apt/state" \
        -o Dir::State::status=/dev/null -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" \
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Acquire::Languages=none -o Acquire::Retries=3 \
        -o APT::Sandbox::User= -o Debug::NoLocking=1 "$@"
}

make_blkio() { # DIRECTORY
    local package
    apt_trixie apt-get update
    apt_trixie apt-get install -y --download-only --no-install-recommends qemu-utils qemu-block-extra libblkio1
    for package in "$LAB_CACHE"/apt-trixie/archives/*.deb; do
        dpkg-deb -x "$package" "$1"
    done
    rm -r "$LAB_CACHE/apt-trixie"
    [[ -e $1/usr/lib/x86_64-linux-gnu/qemu/block-blkio.so ]]
}

fetch_blkio() {
    cached blkio make_blkio
}

# become_blkio TOOL ARGUMENT...: this process becomes qemu-img, qemu-io or qemu-nbd: for a background job or
# a subshell.
become_blkio() {
    local root=$LAB_CACHE/blkio tool=$1 libraries
    shift
    libraries=$root/usr/lib/x86_64-linux-gnu
    QEMU_MODULE_DIR=$libraries/qemu exec "$root/usr/lib64/ld-linux-x86-64.so.2" --library-path "$libraries" \
        "$root/usr/bin/$tool" "$@"
}

# The disk behind SOCKET, as --image-opts wants it.
blkio_disk() { # SOCKET
    printf 'driver=virtio-blk-vhost-user,path=%s,cache.direct=on,discard=unmap' "$1"
}
