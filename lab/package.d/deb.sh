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

# Builds the same tree again as a later version: $SCRATCH/newer.deb.
build_newer_package() {
    local tree=$SCRATCH/tree program
    program=$(readlink -f "$BLKQ")
    sed '1s/(.*)/(0.1.1-1)/' "$tree/debian/changelog" >"$SCRATCH/newer"
    cat "$SCRATCH/newer" "$ROOT/packaging/debian/changelog" >"$tree/debian/changelog"
    (cd "$tree" && BLKQ_PREBUILT=$program dpkg-buildpackage -b -us -uc -d)
    mv "$SCRATCH"/blkq_*.deb "$SCRATCH/newer.deb"
}

# The codename of this machine's Debian, whose libraries the program was linked with.
this_debian() {
    sed -n 's/^VERSION_CODENAME=//p' /etc/os-release
}
