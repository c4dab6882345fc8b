//! Data that is written is read back, by this driver and by QEMU.

use blkq::random::Random;

use super::*;

const PLAIN: BioFlags = BioFlags::empty();

/// Writes, zeroes and discards at random, checked against a model; then reads the image with QEMU.
pub(super) fn exercise(directory: &Directory, path: &Path, size: u64, seed: u64, steps: u32, backing: &[u8]) {
    let mut random = Random::new(seed);
    let mut model = vec![0; size as usize];
    model[..backing.len()].copy_from_slice(backing);
    for _ in 0..2 {
        let device = open(path);
        let mut h = Harness::open(&device).unwrap();
        let limits = device.limits();
        for step in 0..steps {
            let longest = [1, 8, 64, 300][random.below(4) as usize];
            let bytes = (random.below(longest) + 1) * 512;
            let bytes = bytes.min(size);
            let offset = random.below((size - bytes) / 512 + 1) * 512;
            let range = offset as usize..(offset + bytes) as usize;
            match random.below(10) {
                0..5 => {
                    let data = pattern(bytes as usize, seed ^ u64::from(step));
                    model[range].copy_from_slice(&data);
                    let tag = h.write(offset, vec![data]);
                    assert_eq!(h.run(tag).0, Ok(()));
                }
                5 if limits.max_write_zeroes_bytes > 0 => {
                    model[range].fill(0);
                    let kept = random.below(2) == 1 && limits.max_write_zeroes_no_unmap_bytes > 0;
                    let flags = if kept { BioFlags::NO_UNMAP } else { PLAIN };
                    let tag = h.bare(Operation::WriteZeroes, flags, offset, bytes);
                    assert_eq!(h.run(tag).0, Ok(()));
                }
                6 if limits.max_discard_bytes > 0 => {
                    let tag = h.bare(Operation::Discard, PLAIN, offset, bytes);
                    assert_eq!(h.run(tag).0, Ok(()));
                    // After a discard each byte is as before or zero.
                    let read = h.read_back(offset, bytes as usize);
                    for (old, new) in model[range].iter_mut().zip(read) {
                        assert!(new == *old || new == 0);
                        *old = new;
                    }
                }
                7 if step % 4 == 0 => {
                    let tag = h.bare(Operation::Flush, PLAIN, 0, 0);
                    assert_eq!(h.run(tag).0, Ok(()));
                }
                _ => assert!(h.read_back(offset, bytes as usize) == model[range], "{offset} {bytes}"),
            }
        }
        let mut at = 0;
        while at < size {
            let part = (size - at).min(256 << 10);
            assert!(h.read_back(at, part as usize) == model[at as usize..(at + part) as usize], "{at}");
            at += part;
        }
        drop(h);
        drop(device);
        directory.check(path);
    }
    std::fs::write(directory.0.join("model"), &model).unwrap();
    directory.qemu_img(&["compare", "-q", "-f", "raw", "-F", "qcow2", "model", path.to_str().unwrap()]);
}

// Contract: data
#[test]
fn data_reads_the_same_in_qemu_for_every_kind_of_image() {
    if !has_qemu() {
        return;
    }
    let kinds = [
        "cluster_size=64k",
        "cluster_size=512",
        "cluster_size=4k",
        "cluster_size=2M",
        "compat=0.10",
        "lazy_refcounts=on",
        "cluster_size=1k,refcount_bits=1",
        "cluster_size=512,refcount_bits=64",
        "cluster_size=4k,preallocation=metadata",
        "preallocation=full,cluster_size=64k",
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let directory = Directory::new();
        let size = 6 * MIB + 512 * number as u64;
        let path = directory.image("d.qcow2", kind, size);
        eprintln!("{kind}");
        exercise(&directory, &path, size, number as u64, 150, &[]);
    }
}
