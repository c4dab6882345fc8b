//! Listings, and how losetup finds a device.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::Value;

use super::identity;
use crate::place::*;

#[test]
fn attach_list_and_detach_print_the_formats_of_the_original() {
    let place = Place::new("l-life");
    let image = place.image("a b.img", 1 << 20);
    assert_eq!(place.losetup(&[]), "");
    assert_eq!(place.losetup(&["-a"]), "");
    assert_eq!(place.losetup(&["-J"]), "{\n   \"loopdevices\": [\n\n   ]\n}\n");
    let device = place.set_up(&["-r", "-o", "512", "--sizelimit", "4KiB", &image]);
    assert_eq!(device, format!("nbd+unix:///?socket={}/a_b.img.nbd", place.state().display()));
    let ((_, inode), number) = (identity(&image), fs::metadata(&image).unwrap().dev());
    let line = format!("{device}: [{number:04}]:{inode} ({image}), offset 512, sizelimit 4096\n");
    for words in [&["-a"][..], &["-j", &image], &["-j", &image, "-o", "512"], &["a_b.img"], &[&device]] {
        assert_eq!(place.losetup(words), line, "{words:?}");
    }
    assert_eq!(place.losetup(&["-j", &image, "-o", "0"]), "");
    let (width, room) = (image.len(), device.len());
    let table = format!(
        "{:room$} SIZELIMIT OFFSET AUTOCLEAR RO {:width$} DIO LOG-SEC\n\
         {device}      4096    512         0  1 {image}   0     512\n",
        "NAME", "BACK-FILE"
    );
    for words in [&[][..], &["-l"], &["-l", "-a"], &["-l", "a_b.img"], &["-l", "-j", &image]] {
        assert_eq!(place.losetup(words), table, "{words:?}");
    }
    let json = format!(
        "{{\n   \"loopdevices\": [\n      {{\n         \"name\": \"{device}\",\n         \"sizelimit\": 4096,\n         \
         \"offset\": 512,\n         \"autoclear\": false,\n         \"ro\": true,\n         \"back-file\": \"{image}\",\n         \
         \"dio\": false,\n         \"log-sec\": 512\n      }}\n   ]\n}}\n"
    );
    for words in [&["-J"][..], &["-l", "--json"], &["-a", "-J"]] {
        assert_eq!(place.losetup(words), json, "{words:?}");
    }
    let raw = image.replace(' ', "\\x20");
    assert_eq!(place.losetup(&["--raw", "-n"]), format!("{device} 4096 512 0 1 {raw} 0 512\n"));
    assert_eq!(place.losetup(&["-d", &device]), "");
    assert!(place.files().is_empty());
}

#[test]
fn columns_are_those_of_the_original_and_of_blkq_list() {
    let place = Place::new("l-columns");
    let image = place.image("disk.img", 1 << 20);
    place.losetup(&["--loop-ref", "data", "-f", &image]);
    let (number, inode) = identity(&image);
    let (major, minor) = number.split_once(':').unwrap();
    for (column, expected) in [
        ("NAME", place.uri("data").as_str()),
        ("REF", "data"),
        ("AUTOCLEAR", "0"),
        ("BACK-FILE", &image),
        ("BACK-INO", &inode.to_string()),
        ("BACK-MAJ:MIN", &number),
        ("BACK-MAJ", major),
        ("BACK-MIN", minor),
        ("MAJ:MIN", ""),
        ("OFFSET", "0"),
        ("PARTSCAN", "0"),
        ("RO", "0"),
        ("SIZELIMIT", "0"),
        ("DIO", "0"),
        ("log-sec", "512"),
        ("SIZE", "1M"),
        ("EXPORT", &place.uri("data")),
    ] {
        assert_eq!(place.column("data", column), expected, "{column}");
    }
    let every: Value = serde_json::from_str(&place.losetup(&["--output-all", "-J"])).unwrap();
    let object = every["loopdevices"][0].as_object().unwrap();
    assert_eq!((object.len(), &object["maj:min"], &object["back-ino"]), (17, &Value::Null, &inode.into()));
    assert_eq!(place.losetup(&["-n", "-O", "+EXPORT"]).split_whitespace().count(), 9);
    assert!(place.losetup_refused(&["-O", "NAME,FOO"]).contains("unknown column FOO"));
    // `blkq list` has these columns too.
    assert_eq!(
        place.done(&["list", "-O", "name,OFFSET,EXPORT", "--no-headings"]),
        format!("data  0  {}\n", place.uri("data"))
    );
    assert!(
        place.refused(&["list", "--output", "FOO"]).contains("unknown column FOO; the columns are AUTOCLEAR")
    );
}

#[test]
fn a_device_is_found_by_its_file_whatever_that_is_called() {
    let place = Place::new("l-find");
    let image = place.image("disk.img", 4 << 20);
    let other = place.image("other.img", 1 << 20);
    let [low, high] = ["disk.img", "disk.img-2"].map(str::to_owned);
    place.set_up(&["--sizelimit", "1M", &image]);
    place.set_up(&["-o", "1M", &image]);
    place.set_up(&[&other]);
    let names = |words: &[&str]| -> Vec<String> {
        let text = place.done(&[&["list", "--no-headings", "-O", "NAME"], words].concat());
        text.lines().map(str::to_owned).collect()
    };
    let link = place.dir.join("link");
    let hard = place.dir.join("hard");
    std::os::unix::fs::symlink(&image, &link).unwrap();
    fs::hard_link(&image, &hard).unwrap();
    for path in [&image, link.to_str().unwrap(), hard.to_str().unwrap()] {
        assert_eq!(names(&["--backing", path]), [low.clone(), high.clone()], "{path}");
        assert_eq!(names(&["--backing", path, "--offset", "1M"]).concat(), high);
        assert_eq!(place.losetup(&["-j", path]).lines().count(), 2);
    }
    assert_eq!(place.json(&["list", "--json", "--backing", &other]).as_array().unwrap().len(), 1);
    // A renamed image is found and shown by its new name.
    let moved = place.dir.join("moved.img");
    fs::rename(&image, &moved).unwrap();
    assert_eq!(names(&["--backing", moved.to_str().unwrap()]), [low.clone(), high]);
    assert_eq!(place.column(&low, "BACK-FILE"), moved.to_str().unwrap());
    // A new file with the old name is not the image of the device; without such a file the recorded name is used.
    let new = place.image("disk.img", 1 << 20);
    assert!(names(&["--backing", &new]).is_empty());
    fs::remove_file(&new).unwrap();
    assert_eq!(names(&["--backing", &new]).len(), 2);
    assert!(names(&["--backing", "/nonexistent"]).is_empty());
    fs::remove_file(&hard).unwrap();
    fs::remove_file(&moved).unwrap();
    assert!(place.column(&low, "BACK-FILE").ends_with(" (deleted)"));
}
