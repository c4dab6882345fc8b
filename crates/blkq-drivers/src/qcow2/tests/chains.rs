//! Backing files, compressed clusters, internal snapshots, and images that are refused.

use std::time::Duration;

use blkq::{Bio, Disk, IoBuffer, Sector};

use super::data::exercise;
use super::*;
use crate::ImageFormat;
use crate::qcow2::format::L1_AT;
use crate::qcow2::jobs::block_commit::open_base;

fn error(options: &DriverOptions) -> Error {
    Qcow2::open(options).err().expect("opening the image should fail")
}

#[test]
fn extents_of_a_chain_need_a_table_of_each_image() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    directory.image("base", "cluster_size=64k", MIB);
    for (name, base, offset) in [("base", None, 0), ("top", Some("base"), 65536)] {
        if let Some(base) = base {
            directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", name, "1M"]);
        }
        let mut h = Harness::open(&open(&directory.0.join(name))).unwrap();
        let tag = h.write(offset, vec![pattern(4096, 1)]);
        assert_eq!(h.run(tag).0, Ok(()));
        let tag = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
        assert_eq!(h.run(tag).0, Ok(()));
    }
    // No L2 table is in memory.
    let extents = open(&directory.0.join("top")).extents(0..MIB, 10).unwrap();
    let extents: Vec<(u64, bool)> = extents.iter().map(|extent| (extent.length, extent.hole)).collect();
    assert_eq!(extents, [(131_072, false), (MIB - 131_072, true)]);
}

// Contract: direct-io
#[test]
fn a_base_without_direct_io_is_read_through_the_page_cache() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    // overlayfs accepts O_DIRECT for files on ramfs, but direct reads of them fail.
    let lower = directory.mount(&["-t", "ramfs", "blkq-test"], "lower");
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "lower/base", "1M"]);
    directory.qemu_io(&lower.0.join("base"), "write -P 7 0 1M");
    for name in ["upper", "work"] {
        std::fs::create_dir(directory.0.join(name)).unwrap();
    }
    let layer = |name: &str| directory.0.join(name).display().to_string();
    let layers = format!("lowerdir={},upperdir={},workdir={}", layer("lower"), layer("upper"), layer("work"));
    let merged = directory.mount(&["-t", "overlay", "-o", &layers, "blkq-test"], "merged");
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "merged/top"]);
    let options = DriverOptions::new(merged.0.join("top"));
    let device = Qcow2::open(&options).unwrap();
    let facts = device.describe();
    assert!(facts.contains(&("direct-io", "on".to_owned())), "{facts:?}");
    let reason = "its file system fails direct reads";
    let base = merged.0.join("base");
    assert_eq!(device.warnings(), [format!("direct I/O is off for {}: {reason}", base.display())]);
    let mut h = Harness::open(&device).unwrap();
    assert!(h.read_back(0, MIB as usize).iter().all(|byte| *byte == 7));
    assert_eq!(device.extents(0..MIB, 9).unwrap(), [Extent { length: MIB, hole: false, zero: false }]);
    drop((h, device));
    let refused = error(&DriverOptions { direct_io: DirectIo::On, ..options });
    assert_eq!(refused.kind(), ErrorKind::NoDirectIo);
    assert!(refused.to_string().ends_with(reason), "{refused}");
}

// Contract: data
#[test]
fn relative_names_begin_in_the_directory_of_a_link_as_in_qemu() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = |name: &str| directory.0.join(name);
    std::fs::create_dir(path("d")).unwrap();
    for (base, byte) in [("base", 1), ("d/base", 2)] {
        std::fs::write(path(base), vec![byte; MIB as usize]).unwrap();
    }
    let create = |words: &[&str]| {
        directory.qemu_img(&[&["create", "-q", "-f", "qcow2", "-b"], words].concat());
    };
    create(&["base", "-F", "raw", "d/middle"]);
    std::os::unix::fs::symlink("d/middle", path("link")).unwrap();
    // The name leads to this backing file through the link.
    create(&["link", "-F", "qcow2", "top"]);
    let absolute = path("d/base").display().to_string();
    create(&[&absolute, "-F", "raw", "d/absolute"]);
    std::os::unix::fs::symlink("d/absolute", path("absolute-link")).unwrap();
    for (name, byte) in [("d/middle", 2), ("link", 1), ("top", 1), ("absolute-link", 2)] {
        directory.qemu_io(&path(name), &format!("read -P {byte} 0 1M"));
        for backing_chain in [BackingChain::OwnDirectory, BackingChain::Allow] {
            let options = DriverOptions { backing_chain, ..DriverOptions::new(path(name)) };
            let mut h = Harness::open(&Qcow2::open(&options).unwrap()).unwrap();
            assert!(h.read_back(0, MIB as usize).iter().all(|read| *read == byte), "{name}");
        }
    }
    // A block commit finds the same backing file.
    let base = |name| open_base(&path(name), BackingChain::OwnDirectory).unwrap().path;
    assert_eq!([base("link"), base("d/middle"), base("top")], [path("base"), path("d/base"), path("link")]);
    // A new overlay cannot record the directory of the link.
    let refused = Base::open(&path("link"), ImageFormat::Qcow2).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    for name in ["d/middle", "absolute-link", "top"] {
        Base::open(&path(name), ImageFormat::Qcow2).unwrap();
    }
    let device = open(&path("link"));
    let new = std::fs::File::options().read(true).write(true).create_new(true).open(path("new")).unwrap();
    let below = device.overlay_base().unwrap();
    let refused = Qcow2::over(below, new, &path("new"), None).err().unwrap();
    assert!(refused.to_string().contains("is a symbolic link"), "{refused}");
    drop(device);
    // Where QEMU finds no backing file, blkq finds none either, and the hint names the cause.
    std::fs::remove_file(path("base")).unwrap();
    let refused = error(&DriverOptions::new(path("link")));
    assert_eq!(refused.kind(), ErrorKind::NotFound);
    assert!(refused.to_string().contains("link is a symbolic link; use the path of the image itself"));
}

// Contract: data
#[test]
fn all_layers_are_read_and_only_the_overlay_is_written() {
    if !has_qemu() {
        return;
    }
    for kind in ["cluster_size=64k", "cluster_size=512", "compat=0.10", "cluster_size=4k"] {
        let directory = Directory::new();
        let size = 4 * MIB;
        // A raw base that is shorter than all others, and ten overlays, each with data of its own.
        let base = pattern(MIB as usize + 512, 99);
        std::fs::write(directory.0.join("base"), &*base).unwrap();
        let mut model = base.to_vec();
        model.resize(size as usize, 0);
        let (mut backing, mut format) = ("base".to_owned(), "raw");
        for number in 0..10u64 {
            let name = format!("d{number}.qcow2");
            let bytes = size.to_string();
            directory.qemu_img(&[
                "create", "-q", "-f", "qcow2", "-o", kind, "-b", &backing, "-F", format, &name, &bytes,
            ]);
            let path = directory.0.join(&name);
            let device = open(&path);
            let mut h = Harness::open(&device).unwrap();
            let offset = number * 300 * 512;
            let data = pattern(70_144, number);
            model[offset as usize..offset as usize + data.len()].copy_from_slice(&data);
            let tag = h.write(offset, vec![data]);
            assert_eq!(h.run(tag).0, Ok(()));
            assert!(h.read_back(0, 2 << 20) == model[..2 << 20], "{kind} {number}");
            drop(h);
            drop(device);
            directory.check(&path);
            (backing, format) = (name, "qcow2");
        }
        assert_eq!(std::fs::read(directory.0.join("base")).unwrap(), *base);
        exercise(&directory, &directory.0.join(backing), size, 5, 150, &model);
    }
}

// Contract: data
#[test]
fn compressed_clusters_are_read_and_rewritten_uncompressed() {
    if !has_qemu() {
        return;
    }
    for (cluster, method) in [("64k", "zlib"), ("4k", "zlib"), ("2M", "zlib"), ("4k", "zstd"), ("2M", "zstd")]
    {
        let directory = Directory::new();
        let mut data = pattern(4 << 20, 3).to_vec();
        data[1 << 20..3 << 20].iter_mut().enumerate().for_each(|(at, byte)| *byte = (at >> 12) as u8);
        std::fs::write(directory.0.join("raw"), &data).unwrap();
        let options = format!("cluster_size={cluster},compression_type={method}");
        directory.qemu_img(&["convert", "-c", "-O", "qcow2", "-o", &options, "raw", "c.qcow2"]);
        exercise(&directory, &directory.0.join("c.qcow2"), 4 << 20, 11, 150, &data);
    }
}

// Contract: non-blocking
#[test]
fn compressed_clusters_are_not_inflated_on_the_queue_thread() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    std::fs::write(directory.0.join("raw"), vec![7; 4 << 20]).unwrap();
    directory.qemu_img(&["convert", "-c", "-O", "qcow2", "-o", "cluster_size=2M", "raw", "c.qcow2"]);
    let mut h = Harness::open(&open(&directory.0.join("c.qcow2"))).unwrap();
    // All reads are in one cluster, which is decompressed once.
    let tags: Vec<_> = (0..8).map(|number| h.read(number * 4096, &[4096])).collect();
    h.start(&tags);
    for tag in tags {
        assert_eq!(h.wait(tag).0, Ok(()));
    }
    let names = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let mut names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    assert!(names.any(|name| name.trim() == "blkq-inflate"));
}

#[test]
fn a_local_queue_waits_for_a_compressed_cluster() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    std::fs::write(directory.0.join("raw"), vec![7; 4 << 20]).unwrap();
    directory.qemu_img(&["convert", "-c", "-O", "qcow2", "-o", "cluster_size=2M", "raw", "c.qcow2"]);
    let (done, waits) = std::sync::mpsc::channel();
    let path = directory.0.join("c.qcow2");
    std::thread::spawn(move || {
        let disk = Disk::builder(Box::new(open(&path))).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        for cluster in 0..2 {
            // The thread that decompresses wakes the queue, which sleeps in its ring.
            let sector = Sector(cluster << 12);
            queue.submit(Bio::read(sector, IoBuffer::zeroed(4096), cluster)).unwrap();
            queue.wait(1);
            done.send(queue.take_completion().unwrap().result).unwrap();
        }
    });
    for _ in 0..2 {
        assert_eq!(waits.recv_timeout(Duration::from_secs(60)), Ok(Ok(())));
    }
}

// Contract: data
#[test]
fn a_snapshot_keeps_its_data_while_the_image_is_written() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let data = pattern(2 << 20, 4).to_vec();
    std::fs::write(directory.0.join("raw"), &data).unwrap();
    directory.qemu_img(&["convert", "-O", "qcow2", "-o", "cluster_size=4k", "raw", "s.qcow2"]);
    directory.qemu_img(&["snapshot", "-c", "first", "s.qcow2"]);
    exercise(&directory, &directory.0.join("s.qcow2"), 2 << 20, 12, 100, &data);
    directory.qemu_img(&["convert", "-l", "snapshot.name=first", "-O", "raw", "s.qcow2", "back"]);
    assert!(std::fs::read(directory.0.join("back")).unwrap() == data);
}

#[test]
fn a_backing_file_outside_the_directory_is_refused_by_default() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let inner = directory.0.join("inner");
    std::fs::create_dir(&inner).unwrap();
    std::fs::write(directory.0.join("secret"), [7; 65536]).unwrap();
    std::fs::write(inner.join("good"), [8; 65536]).unwrap();
    std::os::unix::fs::symlink("../secret", inner.join("link")).unwrap();
    std::os::unix::fs::symlink("good", inner.join("within")).unwrap();
    let absolute = directory.0.join("secret");
    let top = inner.join("top.qcow2");
    let create = |name: &str| {
        let path = top.to_str().unwrap();
        directory.qemu_img(&["create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "raw", path, "64k"]);
    };
    for name in ["../secret", absolute.to_str().unwrap(), "link", "/proc/self/root/etc/passwd"] {
        create(name);
        assert_eq!(error(&DriverOptions::new(&top)).kind(), ErrorKind::BackingFile, "{name}");
    }
    create("../secret");
    let options = DriverOptions { backing_chain: BackingChain::Allow, ..DriverOptions::new(&top) };
    let device = Qcow2::open(&options).unwrap();
    assert_eq!(Harness::open(&device).unwrap().read_back(0, 512), [7; 512]);
    drop(device);
    let whole = inner.join("good");
    for name in ["good", "within", "./good", whole.to_str().unwrap()] {
        create(name);
        assert_eq!(Harness::open(&open(&top)).unwrap().read_back(0, 512), [8; 512], "{name}");
    }
    create("nbd://localhost/x");
    assert_eq!(error(&options).kind(), ErrorKind::Unsupported);
}

// Contract: data
#[test]
fn a_backing_file_of_a_thousand_bytes_is_read() {
    if !has_qemu() {
        return;
    }
    for bytes in [1000, 512, 4096 + 512, 65536 + 4095] {
        let directory = Directory::new();
        let mut model = pattern(81_920, 5)[..bytes].to_vec();
        std::fs::write(directory.0.join("base"), &model).unwrap();
        directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "d.qcow2", "1M"]);
        model.resize(MIB as usize, 0);
        exercise(&directory, &directory.0.join("d.qcow2"), MIB, 9, 50, &model);
    }
}

#[test]
fn a_backing_file_without_a_format_is_not_guessed_to_be_qcow2() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    directory.image("base", "compat=1.1", MIB);
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "d.qcow2"]);
    let path = directory.0.join("d.qcow2");
    let mut bytes = std::fs::read(&path).unwrap();
    // An unknown header extension stays unchanged.
    let at = bytes.windows(4).position(|word| word == 0xE279_2ACA_u32.to_be_bytes()).unwrap();
    bytes[at..at + 4].copy_from_slice(&[1; 4]);
    std::fs::write(&path, &bytes).unwrap();
    let error = error(&DriverOptions::new(&path)).to_string();
    assert!(error.contains("qemu-img rebase -u -b") && error.contains("-F qcow2"), "{error}");
}

// Contract: exclusive
#[test]
fn a_backing_file_is_locked_before_its_tables_are_read() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let base = directory.image("base", "compat=1.1", MIB);
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "d.qcow2"]);
    let writer = open(&base);
    let file = File::options().write(true).open(&base).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0; 512], 0).unwrap();
    let options = DriverOptions::new(directory.0.join("d.qcow2"));
    assert_eq!(error(&options).kind(), ErrorKind::Busy);
    drop(writer);
    assert_eq!(error(&options).kind(), ErrorKind::Format);
}

// Contract: bounded-input
#[test]
fn a_chain_whose_tables_take_much_memory_is_rejected() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    directory.image("0", "compat=1.1", MIB);
    for number in 0..=4 {
        let (base, name) = ((number - 1).to_string(), number.to_string());
        if number > 0 {
            directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "qcow2", &name]);
        }
        // An L1 table of 32 MiB, which is a hole.
        let file = File::options().write(true).open(directory.0.join(name)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &(4u32 << 20).to_be_bytes(), L1_AT as u64).unwrap();
        file.set_len(64 << 20).unwrap();
    }
    drop(open(&directory.0.join("3")));
    let error = error(&DriverOptions::new(directory.0.join("4")));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("need more than 128 MiB of memory"), "{error}");
}

#[test]
fn a_missing_backing_file_is_reported_with_a_hint() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-u", "-b", "gone", "-F", "raw", "d.qcow2", "64k"]);
    for backing_chain in [BackingChain::OwnDirectory, BackingChain::Allow] {
        let options = DriverOptions { backing_chain, ..DriverOptions::new(directory.0.join("d.qcow2")) };
        let error = error(&options).to_string();
        assert!(
            error.contains("the backing file gone, which does not exist")
                && error.contains("qemu-img rebase -u"),
            "{error}"
        );
    }
    // Outside the directory blkq does not even look for the file, because that could trigger an automount.
    directory.qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-u",
        "-b",
        "/nowhere/gone",
        "-F",
        "raw",
        "e.qcow2",
        "64k",
    ]);
    assert_eq!(error(&DriverOptions::new(directory.0.join("e.qcow2"))).kind(), ErrorKind::BackingFile);
}

#[test]
fn a_backing_chain_with_a_loop_is_rejected() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    for (name, base) in [("a", "b"), ("b", "c"), ("c", "b")] {
        directory.qemu_img(&["create", "-q", "-f", "qcow2", "-u", "-b", base, "-F", "qcow2", name, "64k"]);
    }
    for name in ["a", "b", "c"] {
        assert_eq!(error(&DriverOptions::new(directory.0.join(name))).kind(), ErrorKind::Format);
    }
}

// Contract: exclusive
#[test]
fn no_process_writes_to_an_image_that_a_writer_has_locked() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "compat=1.1", MIB);
    let device = open(&path);
    assert_eq!(error(&DriverOptions::new(&path)).kind(), ErrorKind::Busy);
    let info = |write: bool| {
        let how = if write { "write 0 4k" } else { "read 0 4k" };
        Command::new("qemu-io").args(["-f", "qcow2", "-c", how]).arg(&path).output().unwrap().status.success()
    };
    assert!(!info(false) && !info(true));
    drop(device);
    let reader = DriverOptions { read_only: true, ..DriverOptions::new(&path) };
    let (one, two) = (Qcow2::open(&reader).unwrap(), Qcow2::open(&reader).unwrap());
    assert!(!info(true));
    drop((one, two));
    assert!(info(true));
}

#[test]
fn unsupported_images_are_rejected_with_the_reason() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    for (kind, why) in [
        ("extended_l2=on", "subclusters"),
        ("data_file=other.raw", "external data file"),
        ("encrypt.format=luks,encrypt.key-secret=s", "encrypted"),
    ] {
        let secret = ["--object", "secret,id=s,data=x"];
        let image = [&["create", "-q", "-f", "qcow2"][..], &secret, &["-o", kind, "x.qcow2", "1M"]].concat();
        directory.qemu_img(&image);
        let opened = Qcow2::open(&DriverOptions::new(directory.0.join("x.qcow2")));
        let error = opened.err().unwrap().to_string();
        assert!(error.contains(why), "{error}");
    }
    let path = directory.image("d.qcow2", "lazy_refcounts=on", MIB);
    let mut bytes = std::fs::read(&path).unwrap();
    for (bit, why) in [(1, "was not closed"), (2, "corrupt")] {
        bytes[79] = bit;
        std::fs::write(&path, &bytes).unwrap();
        let error = error(&DriverOptions::new(&path)).to_string();
        assert!(error.contains(why) && error.contains("qemu-img check -r all"), "{error}");
        Qcow2::open(&DriverOptions { read_only: true, ..DriverOptions::new(&path) }).unwrap();
    }
    let path = directory.image("twice.qcow2", "compat=1.1", MIB);
    let file = File::options().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &0x20000_u64.to_be_bytes(), 0x10008).unwrap();
    let twice = error(&DriverOptions::new(&path)).to_string();
    assert!(twice.contains("names a block twice"), "{twice}");
    let path = directory.image("cut.qcow2", "compat=1.1", MIB);
    File::options().write(true).open(&path).unwrap().set_len(0x30000).unwrap();
    let error = error(&DriverOptions::new(&path)).to_string();
    assert!(error.contains("its L1 table is not all in the file"), "{error}");
}
