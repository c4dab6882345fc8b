# shellcheck shell=bash disable=SC2034,SC2154,SC2054 # lab/guest and lab/service set what is used, and use what is set
# The machine that QEMU emulates for a guest.

# The guest's clock is this machine's time stamp counter. Its rate is known if the processors run at the
# rate of the counter; otherwise the guest measures it, which is unreliable on a busy machine.
clock_rate() { # CLOCK
    [[ $1 == real ]] || { printf ' tsc_early_khz=1000000' && return; }
    awk -F: '/^cpu MHz/ { khz = $2 * 1000 } /^flags/ { varies = /aperfmperf/; exit }
        END { if (khz && !varies) printf " tsc_early_khz=%d", khz }' /proc/cpuinfo
}

# machine CLOCK CPUS MEMORY-MIB KERNEL-PARAMETER...: sets MACHINE to QEMU's arguments: processors, memory, the kernel of
# KERNEL_DIR with $SCRATCH/initrd, and a console in $SCRATCH/console. The processor has no fast string move, because
# emulation copies byte by byte for it, which is slowest.
machine() {
    local clock=$1 cpus=$2 memory_mib=$3 accelerator=(-accel "tcg,thread=multi")
    shift 3
    [[ $clock == real ]] || accelerator=(-accel "tcg,thread=single" -icount "shift=0,sleep=on")
    MACHINE=("${accelerator[@]}" -cpu max,-erms,-fsrm -smp "$cpus" -m "${memory_mib}M"
        -object "memory-backend-memfd,id=memory,size=${memory_mib}M,share=on"
        -M q35,memory-backend=memory -nodefaults -no-reboot -display none
        -kernel "$KERNEL_DIR/vmlinuz" -initrd "$SCRATCH/initrd"
        -append "console=ttyS0 loglevel=4 quiet oops=panic panic=-1 mitigations=off nokaslr \
tsc=reliable no_timer_check random.trust_cpu=on$(clock_rate "$clock")${*:+ $*}"
        -serial "file:$SCRATCH/console" -device virtio-serial-pci)
}

# initial_ram DIRECTORY: makes $SCRATCH/initrd of the cached busybox and modules, and of DIRECTORY.
initial_ram() {
    cp "$KERNEL_DIR/initramfs.cpio" "$SCRATCH/initrd"
    (cd "$1" && find . | "$KERNEL_DIR/busybox" cpio --quiet -o -H newc) >>"$SCRATCH/initrd"
}
