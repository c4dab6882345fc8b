//! Settings of new and of existing devices.

use std::fs;
use std::os::unix::fs::FileExt;

use serde_json::Value;

use super::{info, io, size};
use crate::place::*;

/// LTP ioctl_loop04, blktests loop/007: `losetup -c` updates the size and nothing else.
#[test]
fn the_capacity_is_read_again_when_the_file_has_grown() {
    let place = Place::new("l-size");
    let image = place.image("disk.img", 1 << 20);
    let device = place.set_up(&["-b", "1024", &image]);
    let uri = place.uri(&device);
    assert!(io(&uri, "write -P 7 0 64k"));
    fs::File::options().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
    assert_eq!(size(&uri), 1 << 20);
    assert!(!io(&uri, "write -P 8 1M 4k"));
    assert_eq!(place.losetup(&["-c", &device]), "");
    assert_eq!(size(&uri), 2 << 20);
    assert!(io(&uri, "write -P 8 1M 4k") && io(&uri, "read -P 7 0 64k") && io(&uri, "read -P 8 1M 4k"));
    assert_eq!(place.column(&device, "LOG-SEC"), "1024");
    fs::File::options().write(true).open(&image).unwrap().set_len(512 << 10).unwrap();
    place.losetup(&["-c", &device]);
    assert_eq!(size(&uri), 512 << 10);
    assert!(place.losetup_refused(&["-c", "nothing"]).contains("no such device"));
    let _client = client(&uri);
    fs::File::options().write(true).open(&image).unwrap().set_len(256 << 10).unwrap();
    let line = place.losetup_refused(&["-c", &device]);
    assert!(line.contains("connected; disconnect it first, or run `blkq resize --force disk.img`"), "{line}");
}

/// LTP ioctl_loop05: direct I/O is switched on a device in use without loss of data.
#[test]
fn direct_io_is_switched_on_a_live_device() {
    let place = Place::new("l-direct");
    let image = place.image("disk.img", 1 << 20);
    let device = place.set_up(&[&image]);
    let uri = place.uri(&device);
    for (number, (option, on)) in
        [("--direct-io=on", "1"), ("--direct-io=off", "0"), ("--direct-io", "1"), ("--direct-io", "1")]
            .iter()
            .enumerate()
    {
        assert!(io(&uri, &format!("write -P {} 0 64k", number + 1)));
        assert_eq!(place.losetup(&[option, &device]), "");
        assert_eq!(place.column(&device, "DIO"), *on);
        assert!(io(&uri, &format!("read -P {} 0 64k", number + 1)), "{option}");
    }
    // Direct I/O can be set at attach; a device without a file rejects it.
    let other = place.image("other.img", 1 << 20);
    let device = place.set_up(&["--direct-io=on", &other]);
    assert_eq!(place.column(&device, "DIO"), "1");
    place.done(&["attach", "ram:1M"]);
    place.losetup_refused(&["--direct-io=on", "ram"]);
    assert_eq!(place.column("ram", "DIO"), "0");
}

/// Corresponds to LTP ioctl_loop06 and blktests loop/002.
#[test]
fn sector_sizes_are_powers_of_two_up_to_a_page() {
    let place = Place::new("l-sector");
    let image = place.image("disk.img", 1 << 20);
    for bytes in ["512", "1024", "2048", "4096", "4K"] {
        for direct_io in ["--direct-io=off", "--direct-io=on"] {
            let device = place.set_up(&["-b", bytes, direct_io, &image]);
            let uri = place.uri(&device);
            let block = bytes.replace("4K", "4096");
            assert_eq!(place.column(&device, "LOG-SEC"), block);
            let json: Value = serde_json::from_str(&info(&["--json", &uri])).unwrap();
            assert_eq!(json["exports"][0]["block_size_minimum"].to_string(), block);
            assert!(io(&uri, "write -P 5 8k 64k") && io(&uri, "read -P 5 8k 64k"), "{bytes} {direct_io}");
            place.losetup(&["-d", &device]);
        }
    }
    for bytes in ["0", "256", "511", "1234", "3072", "8192", "1M"] {
        let line = place.losetup_refused(&["-f", "-b", bytes, &image]);
        assert!(line.contains("512, 1024, 2048 or 4096"), "{line}");
    }
    // The sector size of a device in use cannot be changed.
    let device = place.set_up(&["-b", "2048", &image]);
    assert_eq!(place.losetup(&["-b", "2048", &device]), "");
    assert!(place.losetup_refused(&["-b", "512", &device]).contains("attach the file with -b 512"));
    assert!(place.losetup_refused(&["-b", "1234", &device]).contains("512, 1024, 2048 or 4096"));
    assert_eq!(place.column(&device, "LOG-SEC"), "2048");
    place.losetup(&["-D"]);
    assert!(
        place
            .losetup_refused(&["-f", "-b", "4096", "-o", "512", &image])
            .contains("multiple of the sector size")
    );
    assert!(place.files().is_empty());
}

/// Corresponds to the test ioctl_loop07 of LTP.
#[test]
fn the_size_limit_is_kept() {
    let place = Place::new("l-limit");
    let image = place.image("disk.img", 1 << 20);
    let device = place.set_up(&["--sizelimit", "512K", "-o", "4096", &image]);
    let uri = place.uri(&device);
    assert_eq!((size(&uri), place.column(&device, "SIZELIMIT")), (512 << 10, "524288".to_owned()));
    assert!(io(&uri, "write -P 9 520192 4096") && !io(&uri, "write -P 9 520192 8192"));
    let file = fs::File::options().read(true).write(true).open(&image).unwrap();
    let mut after = [1; 512];
    file.read_exact_at(&mut after, 4096 + (512 << 10)).unwrap();
    assert_eq!(after, [0; 512]);
    // The limit applies to a grown file, not to a shorter one, and again once that file has grown.
    for (length, expected) in [(4u64 << 20, 512u64 << 10), (256 << 10, 252 << 10), (1 << 20, 512 << 10)] {
        file.set_len(length).unwrap();
        place.losetup(&["-c", &device]);
        assert_eq!(size(&uri), expected);
    }
    place.losetup(&["-d", &device]);
    // 0 means no limit.
    let device = place.set_up(&["--sizelimit", "0", &image]);
    assert_eq!((size(&place.uri(&device)), place.column(&device, "SIZELIMIT")), (1 << 20, "0".to_owned()));
    place.losetup(&["-d", &device]);
    assert!(
        place
            .losetup_refused(&["-f", "--sizelimit", "2M", &image])
            .contains("choose less, or extend the image")
    );
    assert!(place.losetup_refused(&["-f", "--sizelimit", "1000", &image]).contains("not a multiple"));
}
