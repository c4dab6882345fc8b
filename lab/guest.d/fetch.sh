# shellcheck shell=bash disable=SC2034 # lab/guest uses these variables
# The parts of a guest, from Debian's packages: downloaded and unpacked, never installed, so that
# they do not conflict with the machine's packages. Apt uses separate lists here, for suites that the
# machine need not have configured.

LAB_CACHE=${LAB_CACHE:-${CARGO_TARGET_DIR:-$ROOT/target}/lab}
DEBIAN=${DEBIAN_MIRROR:-http://deb.debian.org}
SUITES=(bookworm bookworm-backports trixie-backports)

# The modules that the guest needs for its root, its scratch disk and its output.
BOOT_MODULES=(virtio_pci virtio_console virtio_blk 9pnet_virtio 9p overlay ext4)

apt_own() { # COMMAND ARGUMENT...: apt-get or apt-cache on the lists of the lab
    local command=$1
    shift
    "$command" -qq -o Dir::Etc::sourcelist="$LAB_CACHE/apt/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$LAB_CACHE/apt/lists" -o Dir::Cache="$LAB_CACHE/apt" \
        -o Dir::Cache::archives="$LAB_CACHE/apt/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= \
        -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false \
        -o Acquire::Retries=3 -o APT::Sandbox::User= -o Debug::NoLocking=1 "$@"
}

# apt_of SUITE COMMAND ARGUMENT...: runs apt-get or apt-cache for SUITE in $LAB_CACHE/apt-SUITE, with an empty list
# of installed packages
apt_of() {
    local suite=$1 apt=$LAB_CACHE/apt-$1 command=$2
    shift 2
    mkdir -p "$apt/state/lists/partial" "$apt/archives/partial"
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s/debian %s main\n' "$DEBIAN" "$suite" \
        >"$apt/sources.list"
    "$command" -qq -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State="$apt/state" \
        -o Dir::State::status=/dev/null -o Dir::Cache="$apt" -o Dir::Cache::archives="$apt/archives" \
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Acquire::Languages=none -o Acquire::Retries=3 \
        -o APT::Sandbox::User= -o Debug::NoLocking=1 "$@"
}

# Updates the package lists, at most once a day.
apt_lists() {
    local apt=$LAB_CACHE/apt suite
    [[ -z $(find "$apt/updated" -mtime -1 2>/dev/null) ]] || return 0
    mkdir -p "$apt/lists/partial" "$apt/archives/partial"
    for suite in "${SUITES[@]}"; do
        printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s/debian %s main\n' "$DEBIAN" "$suite"
    done >"$apt/sources.list"
    printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s/debian-security bookworm-security main\n' \
        "$DEBIAN" >>"$apt/sources.list"
    apt_own apt-get update || die "no package lists from $DEBIAN (see above)"
    touch "$apt/updated"
}

# Prints the releases of Debian's kernels, the oldest first.
offered_kernels() {
    apt_own apt-cache search --names-only '^linux-image-[0-9][^ ]*[0-9]-amd64$' |
        sed -nE 's/^linux-image-([0-9][^ ]*-amd64) .*/\1/p' | sort -uV
}

newest_kernel() { # VERSION
    offered_kernels | awk -v wanted="$1" 'index($0 ".", wanted) == 1 && substr($0, length(wanted) + 1, 1) ~ /[.+-]/' | tail -n 1
}

# cached CACHED-NAME COMMAND...: unless $LAB_CACHE/CACHED-NAME exists, runs COMMAND with a temporary directory as its
# last argument, under a lock, and renames the directory to CACHED-NAME if COMMAND succeeds.
cached() { # CACHED-NAME COMMAND...
    local name=$1 partial code
    shift
    [[ ! -d $LAB_CACHE/$name ]] || return 0
    mkdir -p "$LAB_CACHE"
    (
        flock 9
        [[ ! -d $LAB_CACHE/$name ]] || exit 0
        rm -rf "$LAB_CACHE"/partial.*
        partial=$(mktemp -d "$LAB_CACHE/partial.XXXXXX") && chmod 755 "$partial"
        printf 'fetching %s ...\n' "$name" >&2
        # Not on the left of ||, where bash would ignore set -e.
        (
            set -eo pipefail
            apt_lists
            "$@" "$partial"
        ) >"$LAB_CACHE/fetch.log" 2>&1
        code=$?
        [[ $code -eq 0 ]] ||
            die "could not fetch $name; the end of $LAB_CACHE/fetch.log: $(tail -n 5 "$LAB_CACHE/fetch.log")"
        rm -f "$LAB_CACHE"/apt/archives/*.deb
        mv "$partial" "$LAB_CACHE/$name"
    ) 9>"$LAB_CACHE/lock" || exit 1
}

# download_and_unpack DIRECTORY PACKAGE...
download_and_unpack() {
    local directory=$1 package
    shift
    (cd "$LAB_CACHE/apt/archives" && rm -f -- *.deb && apt_own apt-get download "$@")
    for package in "$LAB_CACHE"/apt/archives/*.deb; do
        dpkg-deb -x "$package" "$directory"
    done
}

# In newer releases of Debian, linux-image-RELEASE depends on the packages that contain the modules and the image.
unpack_kernel() { # RELEASE DIRECTORY
    local release=$1 directory=$2 packages
    packages=$(apt_own apt-cache depends "linux-image-$release" | sed -n "s/^ *Depends: \(linux-.*-$release\)$/\1/p")
    # shellcheck disable=SC2086 # names
    download_and_unpack "$directory/all" "linux-image-$release" $packages busybox-static
    mv "$directory/all/bin/busybox" "$directory/busybox"
    mkdir "$directory/lib"
    mv "$directory"/all/{,usr/}lib/modules "$directory/lib/" 2>/dev/null || true
    mv "$directory/all/boot/vmlinuz-$release" "$directory/vmlinuz" 2>/dev/null ||
        mv "$directory/lib/modules/$release/vmlinuz" "$directory/vmlinuz"
    rm -r "$directory/all"
    depmod -b "$directory" "$release"
    boot_modules "$release" "$directory"
}

# Creates $directory/initramfs.cpio: busybox, the modules for the boot, and modules/order with their order.
boot_modules() { # RELEASE DIRECTORY
    local release=$1 directory=$2 tree=$2/initramfs module file
    mkdir -p "$tree"/{bin,modules,dev,proc,sys,lower,upper,root}
    cp "$directory/busybox" "$tree/bin/busybox"
    ln -s busybox "$tree/bin/sh"
    for module in "${BOOT_MODULES[@]}"; do
        modprobe -C /dev/null -d "$directory" -S "$release" --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$directory/order"
    while read -r file; do
        module=${file##*/}
        module=${module%.xz}
        if [[ $file == *.xz ]]; then xz -dc "$file" >"$tree/modules/$module"; else cp "$file" "$tree/modules/"; fi
        printf '%s\n' "$module"
    done <"$directory/order" >"$tree/modules/order"
    (cd "$tree" && find . | ./bin/busybox cpio --quiet -o -H newc) >"$directory/initramfs.cpio"
    rm -rf "$tree" "$directory/order"
}

make_kernel() { # VERSION DIRECTORY
    local release
    release=$(newest_kernel "$1")
    [[ $release ]] || { printf 'Debian offers no kernel %s\n' "$1" && return 1; }
    unpack_kernel "$release" "$2"
}

# fetch_kernel VERSION: sets KERNEL_DIR.
fetch_kernel() {
    [[ $1 =~ ^[0-9][0-9A-Za-z.+-]*$ ]] || wrong_usage "no version of a kernel: $1"
    cached "kernel-$1" make_kernel "$1"
    KERNEL_DIR=$LAB_CACHE/kernel-$1
}

# From the first suite whose QEMU works with the machine's packages: newer tools of QEMU refuse an
# older emulator.
make_qemu() { # DIRECTORY
    local suite package
    rm -f "$LAB_CACHE"/apt/archives/*.deb
    for suite in "${SUITES[@]}"; do
        apt_own apt-get install -y --download-only --no-install-recommends -t "$suite" qemu-system-x86 || continue
        break
    done
    for package in "$LAB_CACHE"/apt/archives/*.deb; do
        dpkg-deb -x "$package" "$1"
    done
    [[ -x $1/usr/bin/qemu-system-x86_64 ]]
}

# fetch_qemu: sets QEMU to the command and its first arguments.
fetch_qemu() {
    local directory=$LAB_CACHE/qemu libraries
    QEMU=(qemu-system-x86_64)
    ! command -v qemu-system-x86_64 >/dev/null || return 0
    cached qemu make_qemu
    libraries=$directory/usr/lib/x86_64-linux-gnu
    QEMU=(env "LD_LIBRARY_PATH=$libraries:$directory/lib/x86_64-linux-gnu" "QEMU_MODULE_DIR=$libraries/qemu"
        "$directory/usr/bin/qemu-system-x86_64" -L "$directory/usr/share/qemu" -L "$directory/usr/share/seabios")
}

list_kernels() {
    local release directory
    mkdir -p "$LAB_CACHE"
    apt_lists
    for release in $(offered_kernels); do
        printf '%-32s' "$release"
        for directory in "$LAB_CACHE"/kernel-*/lib/modules/"$release"; do
            [[ ! -d $directory ]] || printf ' here, as %s' "$(sed -E 's|.*/kernel-([^/]*)/lib/.*|\1|' <<<"$directory")"
        done
        printf '\n'
    done
}
