use blkq::{BioFlags, Operation, Status};

use super::*;
use blkq::testing::harness::{Harness, pattern};

/// Names the variable with the image of a test cluster, as `POOL/IMAGE`. `CEPH_CONF` names the cluster's configuration.
const IMAGE_VARIABLE: &str = "BLKQ_TEST_RBD_IMAGE";

fn open(spec: &str, options: DriverOptions) -> Result<Rbd, Error> {
    Rbd::open(&spec.parse().unwrap(), &options)
}

#[test]
fn bad_options_are_rejected_without_a_cluster() {
    let odd = DriverOptions { logical_block_bytes: Some(1000), ..DriverOptions::default() };
    assert_eq!(open("p/i", odd).err().unwrap().kind(), ErrorKind::Invalid);
    let nowhere =
        DriverOptions { ceph_conf: Some("/nonexistent/ceph.conf".into()), ..DriverOptions::default() };
    let error = open("p/i", nowhere).err().unwrap();
    // On a machine without Ceph's libraries the error names these instead.
    let text = error.to_string();
    assert!(text.contains("/nonexistent/ceph.conf") || error.kind() == ErrorKind::Unsupported, "{text}");
}

#[test]
fn values_that_ceph_reads_as_false_are_recognised() {
    for (value, off) in
        [("false", true), ("False", true), ("0", true), (" 0 ", true), ("true", false), ("1", false)]
    {
        assert_eq!(image::is_false(value), off, "{value:?}");
    }
}

/// The image of the test cluster. The tests overwrite its content.
fn image() -> String {
    std::env::var(IMAGE_VARIABLE).expect("it names an image (docs/internals/testing.md)")
}

fn open_image(options: DriverOptions) -> Result<Rbd, Error> {
    open(&image(), options)
}

#[test]
#[ignore = "needs a cluster"]
fn written_data_is_read_back_from_a_cluster() {
    let device = open_image(DriverOptions::default()).unwrap();
    let limits = device.limits();
    limits.validate().unwrap();
    assert!(limits.write_cache && !limits.fua && !limits.read_only, "{limits:?}");
    let mut h = Harness::open(&device).unwrap();
    // A merged write, with several segments of different lengths.
    let (first, second) = (pattern(4096, 1), pattern(1024, 2));
    let expected = [&first[..], &second[..]].concat();
    let write = h.write(8192, vec![first, second]);
    assert_eq!(h.run(write).0, Ok(()));
    let read = h.read(8192, &[512, 4096, 512]);
    assert_eq!(h.run(read), (Ok(()), expected));
    for (operation, flags) in [
        (Operation::Flush, BioFlags::empty()),
        (Operation::WriteZeroes, BioFlags::empty()),
        (Operation::WriteZeroes, BioFlags::NO_UNMAP),
        (Operation::Discard, BioFlags::empty()),
    ] {
        let full = h.write(0, vec![pattern(1 << 20, 3)]);
        assert_eq!(h.run(full).0, Ok(()));
        let bytes = if operation == Operation::Flush { 0 } else { 1 << 19 };
        let tag = h.bare(operation, flags, 0, bytes);
        assert_eq!(h.run(tag).0, Ok(()), "{operation:?} {flags:?}");
        if operation == Operation::WriteZeroes {
            assert_eq!(h.read_back(0, 1 << 19), vec![0; 1 << 19], "{flags:?}");
        }
        assert_eq!(h.read_back(1 << 19, 1 << 19), pattern(1 << 20, 3)[1 << 19..], "{operation:?}");
    }
    let fast = BioFlags::NO_UNMAP | BioFlags::NO_FALLBACK;
    let tag = h.bare(Operation::WriteZeroes, fast, 0, 4096);
    assert_eq!(h.run(tag).0, Err(Status::NotSupported));
}

#[test]
#[ignore = "needs a cluster"]
fn many_requests_are_in_flight_together() {
    let device = open_image(DriverOptions::default()).unwrap();
    let mut h = Harness::open(&device).unwrap();
    let writes: Vec<_> = (0..32).map(|i| h.write(i << 12, vec![pattern(4096, 100 + i)])).collect();
    h.start(&writes);
    writes.iter().for_each(|&tag| assert_eq!(h.wait(tag).0, Ok(())));
    let reads: Vec<_> = (0..32).map(|i| h.read(i << 12, &[4096])).collect();
    h.start(&reads);
    for (i, &tag) in reads.iter().enumerate() {
        assert!(h.has_completed(tag) || h.state(tag).contains("waiting for the cluster"));
        assert_eq!(h.wait(tag), (Ok(()), pattern(4096, 100 + i as u64).to_vec()));
    }
}

#[test]
#[ignore = "needs a cluster"]
fn a_locked_image_is_refused_to_writers_but_not_to_readers() {
    let first = open_image(DriverOptions::default()).unwrap();
    assert!(first.describe().contains(&("exclusive-lock", "held".to_owned())));
    let refused = open_image(DriverOptions::default()).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    assert!(refused.to_string().contains("locked by the client at"), "{refused}");
    let reader = open_image(DriverOptions { read_only: true, ..DriverOptions::default() }).unwrap();
    assert!(reader.limits().read_only);
    // The refused client has not taken the lock.
    let mut h = Harness::open(&first).unwrap();
    let write = h.write(0, vec![pattern(4096, 9)]);
    assert_eq!(h.run(write).0, Ok(()));
    let mut r = Harness::open(&reader).unwrap();
    let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
    assert_eq!(h.run(flush).0, Ok(()));
    assert_eq!(r.read_back(0, 4096), pattern(4096, 9).to_vec());
    drop((h, first));
    // The lock was released with the first device.
    drop(open_image(DriverOptions::default()).unwrap());
}

#[test]
#[ignore = "needs a cluster"]
fn a_missing_pool_or_image_is_named() {
    let why = |spec: &str| open(spec, DriverOptions::default()).err().unwrap();
    let pool = image().parse::<RbdSpec>().unwrap().pool;
    for (spec, named) in
        [("nowhere-pool/i".to_owned(), "nowhere-pool"), (format!("{pool}/nowhere"), "nowhere")]
    {
        let error = why(&spec);
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains(named), "{error}");
    }
}

#[test]
#[ignore = "needs a cluster"]
fn a_size_larger_than_the_image_is_refused() {
    let device = open_image(DriverOptions::default()).unwrap();
    let bytes = device.limits().capacity_bytes;
    assert_eq!(device.prepare_resize(None).unwrap(), bytes);
    assert_eq!(device.prepare_resize(Some(bytes - 4096)).unwrap(), bytes - 4096);
    let error = device.prepare_resize(Some(bytes + 4096)).unwrap_err();
    assert!(error.to_string().contains("rbd resize"), "{error}");
}

#[test]
#[ignore = "needs a cluster"]
fn write_through_disables_the_cache_of_librbd() {
    let cache = |write_through| {
        let device = open_image(DriverOptions { write_through, ..DriverOptions::default() }).unwrap();
        assert_eq!(device.warnings(), Vec::<String>::new());
        device.describe().into_iter().find(|(name, _)| *name == "rbd-cache").unwrap().1
    };
    assert_eq!(cache(true), "off");
    assert_eq!(cache(false), "on");
}
