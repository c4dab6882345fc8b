# shellcheck shell=bash
# The Debian package of the program under test, for scripts that install it.

# Builds it from packaging/debian: $SCRATCH/blkq.deb.
build_package() {
    local tree=$SCRATCH/tree program
    program=$(readlink -f "$BLKQ")
    mkdir "$tree"
    cp -r "$ROOT/packaging" "$ROOT/docs" "$ROOT/README.md" "$tree"
    cp -r "$ROOT/packaging/debian" "$tree/debian"
    (cd "$tree" && BLKQ_PREBUILT=$program dpkg-buildpackage -b -us -uc -d)
    mv "$SCRATCH"/blkq_*.deb "$SCRATCH/blkq.deb"
}

# The codename of this machine's Debian, whose libraries the program was linked with.
this_debian() {
    sed -n 's/^VERSION_CODENAME=//p' /etc/os-release
}
