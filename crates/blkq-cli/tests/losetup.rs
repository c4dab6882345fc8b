//! `blkq losetup` and what stands behind it, as users of losetup(8) run it. Some tests carry
//! over what LTP (ioctl_loop04 to 07) and blktests (loop/002, 006, 007) check of the kernel's
//! loop device.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod place;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Command, Output};

use place::*;
use serde_json::Value;

impl Place {
    /// What `blkq losetup` prints when it succeeds and says nothing else.
    fn losetup(&self, words: &[&str]) -> String {
        self.done(&[&["losetup"], words].concat())
    }

    /// Its one line when it refuses.
    fn losetup_refused(&self, words: &[&str]) -> String {
        self.refused(&[&["losetup"], words].concat())
    }

    /// Attaches as `losetup -f --show` does.
    fn set_up(&self, words: &[&str]) -> String {
        self.losetup(&[&["-f", "--show"], words].concat()).trim_end().to_owned()
    }

    fn uri(&self, device: &str) -> String {
        self.json(&["show", device, "--json"])["exports"][0].as_str().unwrap().to_owned()
    }

    /// A column of a device.
    fn column(&self, device: &str, column: &str) -> String {
        self.losetup(&["-n", "-O", column, device]).trim().to_owned()
    }

    /// Several commands at the same moment.
    fn at_once(&self, lines: &[Vec<&str>]) -> Vec<Output> {
        let start = |words: &Vec<&str>| {
            let mut command = self.command(words);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
            command.spawn().unwrap()
        };
        let children: Vec<_> = lines.iter().map(start).collect();
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
    }
}

fn tool(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().expect("libnbd-bin and qemu-utils are installed")
}

fn info(arguments: &[&str]) -> String {
    let output = tool("nbdinfo", arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn size(uri: &str) -> u64 {
    info(&["--size", uri]).parse().unwrap()
}

/// Whether qemu-io does `command`; a read with a pattern fails if there is another.
fn io(uri: &str, command: &str) -> bool {
    let output = tool("qemu-io", &["-f", "raw", "-c", command, uri]);
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    output.status.success() && !text.contains("failed") && !text.contains("error")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn identity(path: &str) -> (String, u64) {
    let metadata = fs::metadata(path).unwrap();
    let (major, minor) = (rustix::fs::major(metadata.dev()), rustix::fs::minor(metadata.dev()));
    (format!("{major}:{minor}"), metadata.ino())
}

#[test]
fn a_file_is_attached_listed_and_detached_in_the_original_s_formats() {
    let place = Place::new("l-life");
    let image = place.image("a b.img", 1 << 20);
    assert_eq!(place.losetup(&[]), "");
    assert_eq!(place.losetup(&["-a"]), "");
    assert_eq!(place.losetup(&["-J"]), "{\n   \"loopdevices\": [\n\n   ]\n}\n");
    let device = place.set_up(&["-r", "-o", "512", "--sizelimit", "4KiB", &image]);
    assert_eq!(device, "a_b.img");
    let ((_, inode), number) = (identity(&image), fs::metadata(&image).unwrap().dev());
    let line = format!("a_b.img: [{number:04}]:{inode} ({image}), offset 512, sizelimit 4096\n");
    for words in [&["-a"][..], &["-j", &image], &["-j", &image, "-o", "512"], &["a_b.img"]] {
        assert_eq!(place.losetup(words), line, "{words:?}");
    }
    assert_eq!(place.losetup(&["-j", &image, "-o", "0"]), "");
    let width = image.len();
    let table = format!(
        "NAME    SIZELIMIT OFFSET AUTOCLEAR RO {:width$} DIO LOG-SEC\n\
         a_b.img      4096    512         0  1 {image}   0     512\n",
        "BACK-FILE"
    );
    for words in [&[][..], &["-l"], &["-l", "-a"], &["-l", "a_b.img"], &["-l", "-j", &image]] {
        assert_eq!(place.losetup(words), table, "{words:?}");
    }
    let json = format!(
        "{{\n   \"loopdevices\": [\n      {{\n         \"name\": \"a_b.img\",\n         \"sizelimit\": 4096,\n         \
         \"offset\": 512,\n         \"autoclear\": false,\n         \"ro\": true,\n         \"back-file\": \"{image}\",\n         \
         \"dio\": false,\n         \"log-sec\": 512\n      }}\n   ]\n}}\n"
    );
    for words in [&["-J"][..], &["-l", "--json"], &["-a", "-J"]] {
        assert_eq!(place.losetup(words), json, "{words:?}");
    }
    let raw = image.replace(' ', "\\x20");
    assert_eq!(place.losetup(&["--raw", "-n"]), format!("a_b.img 4096 512 0 1 {raw} 0 512\n"));
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
        ("NAME", "data"),
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
    assert!(place.losetup_refused(&["-O", "NAME,FOO"]).contains("unknown column: FOO"));
    // blkq's own list has them too.
    assert_eq!(
        place.done(&["list", "-O", "name,OFFSET,EXPORT", "--no-headings"]),
        format!("data  0  {}\n", place.uri("data"))
    );
    assert!(place.refused(&["list", "--output", "FOO"]).contains("unknown column: FOO; there are AUTOCLEAR"));
}

#[test]
fn a_device_is_found_by_its_file_whatever_that_is_called() {
    let place = Place::new("l-find");
    let image = place.image("disk.img", 4 << 20);
    let other = place.image("other.img", 1 << 20);
    let low = place.set_up(&["--sizelimit", "1M", &image]);
    let high = place.set_up(&["-o", "1M", &image]);
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
    // Renamed, it is found and shown by its new name.
    let moved = place.dir.join("moved.img");
    fs::rename(&image, &moved).unwrap();
    assert_eq!(names(&["--backing", moved.to_str().unwrap()]), [low.clone(), high]);
    assert_eq!(place.column(&low, "BACK-FILE"), moved.to_str().unwrap());
    // What now has the old name is another file; and where there is none, the name counts.
    let new = place.image("disk.img", 1 << 20);
    assert!(names(&["--backing", &new]).is_empty());
    fs::remove_file(&new).unwrap();
    assert_eq!(names(&["--backing", &new]).len(), 2);
    assert!(names(&["--backing", "/nonexistent"]).is_empty());
    fs::remove_file(&hard).unwrap();
    fs::remove_file(&moved).unwrap();
    assert!(place.column(&low, "BACK-FILE").ends_with(" (deleted)"));
}

/// LTP ioctl_loop04, blktests loop/007: the size is taken over when asked for, and nothing else.
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
}

/// LTP ioctl_loop05: on a live device, with nothing lost on the way.
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
    // From the start, and what has no file refuses it.
    let other = place.image("other.img", 1 << 20);
    let device = place.set_up(&["--direct-io=on", &other]);
    assert_eq!(place.column(&device, "DIO"), "1");
    place.done(&["attach", "ram:1M"]);
    place.losetup_refused(&["--direct-io=on", "ram"]);
    assert_eq!(place.column("ram", "DIO"), "0");
}

/// LTP ioctl_loop06, blktests loop/002.
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
            let told: Value = serde_json::from_str(&info(&["--json", &uri])).unwrap();
            assert_eq!(told["exports"][0]["block_size_minimum"].to_string(), block);
            assert!(io(&uri, "write -P 5 8k 64k") && io(&uri, "read -P 5 8k 64k"), "{bytes} {direct_io}");
            place.losetup(&["-d", &device]);
        }
    }
    for bytes in ["0", "256", "511", "1234", "3072", "8192", "1M"] {
        let line = place.losetup_refused(&["-f", "-b", bytes, &image]);
        assert!(line.contains("512, 1024, 2048 or 4096"), "{line}");
    }
    // A device in use keeps the one it has.
    let device = place.set_up(&["-b", "2048", &image]);
    assert_eq!(place.losetup(&["-b", "2048", &device]), "");
    assert!(place.losetup_refused(&["-b", "512", &device]).contains("detach it, and attach with -b 512"));
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

/// LTP ioctl_loop07.
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
    // It limits a file that has grown, nothing in one that is too short, and again after that.
    for (length, expected) in [(4u64 << 20, 512u64 << 10), (256 << 10, 252 << 10), (1 << 20, 512 << 10)] {
        file.set_len(length).unwrap();
        place.losetup(&["-c", &device]);
        assert_eq!(size(&uri), expected);
    }
    place.losetup(&["-d", &device]);
    // None at all.
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

#[test]
fn attaching_at_the_same_moment_never_collides() {
    let place = Place::new("l-race");
    let images: Vec<String> =
        (0..20).map(|n| place.image(&format!("{n}/disk.img").replace('/', "-"), 1 << 20)).collect();
    // Twenty images of one file name in twenty directories.
    let same_named: Vec<String> = (0..20)
        .map(|n| {
            fs::create_dir(place.dir.join(n.to_string())).unwrap();
            place.image(&format!("{n}/same.img"), 1 << 20)
        })
        .collect();
    for paths in [&images, &same_named] {
        let lines: Vec<Vec<&str>> = paths.iter().map(|path| vec!["losetup", "-f", "--show", path]).collect();
        let outputs = place.at_once(&lines);
        let mut names: Vec<String> = outputs.iter().map(stdout).collect();
        for output in &outputs {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 20);
        for (path, output) in paths.iter().zip(&outputs) {
            assert_eq!(place.column(stdout(output).trim(), "BACK-FILE"), *path, "each has its own");
        }
        place.losetup(&["-D"]);
        assert!(place.files().is_empty());
    }
    // One image: one gets it, the others are told so.
    let image = &images[0];
    let outputs = place.at_once(&vec![vec!["losetup", "-f", "--show", image]; 20]);
    let (done, refused): (Vec<_>, Vec<_>) = outputs.iter().partition(|output| output.status.success());
    assert_eq!((done.len(), refused.len()), (1, 19));
    for output in refused {
        assert!(String::from_utf8_lossy(&output.stderr).contains("is in use"));
    }
    place.losetup(&["-D"]);
    // One image and --nooverlap: all get the same device. Also for reading only, where no lock
    // keeps them apart, and also if others ask without it.
    for access in ["--direct-io=off", "-r"] {
        let outputs = place.at_once(&vec![vec!["losetup", "-L", access, "-f", "--show", image]; 20]);
        assert!(
            outputs.iter().all(|output| output.status.success() && stdout(output) == "0-disk.img\n"),
            "{outputs:?}"
        );
        assert_eq!(place.losetup(&["-a"]).lines().count(), 1);
        place.losetup(&["-D"]);
    }
    let mixed = [vec!["losetup", "-f", "--show", image], vec!["losetup", "-L", "-f", "--show", image]];
    let lines: Vec<Vec<&str>> = (0..20).map(|n| mixed[n % 2].clone()).collect();
    let outputs = place.at_once(&lines);
    let device = place.losetup(&["-n", "-O", "NAME"]);
    for (line, output) in lines.iter().zip(&outputs) {
        let refused = !line.contains(&"-L") && output.status.code() == Some(1);
        assert!(refused || stdout(output) == device, "{device}: {output:?}");
    }
    place.losetup(&["-D"]);
    // Shared by all, with a name for each.
    let outputs = place.at_once(&vec![vec!["attach", image, "--shared"]; 20]);
    assert!(outputs.iter().all(|output| output.status.success()));
    assert_eq!(place.losetup(&["-a"]).lines().count(), 20);
}

/// blktests loop/006: devices come and go on the same file without spurious failures.
#[test]
fn nooverlap_holds_its_own_while_the_device_is_detached_again_and_again() {
    let place = Place::new("l-storm");
    let image = place.image("disk.img", 1 << 20);
    for access in ["--direct-io=off", "-r"] {
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..8 {
                        let device = place.set_up(&["-L", access, &image]);
                        // Somebody else may have done it.
                        let output = place.run(&["losetup", "-d", &device]);
                        let text = String::from_utf8_lossy(&output.stderr).into_owned();
                        let gone = ["no such device", "ending", "gave no answer"];
                        assert!(
                            output.status.success() || gone.iter().any(|why| text.contains(why)),
                            "{text}"
                        );
                    }
                });
            }
        });
    }
    wait_until("all are gone", || place.files().is_empty());
}

#[test]
fn nooverlap_reuses_what_is_the_same_and_refuses_what_overlaps() {
    let place = Place::new("l-overlap");
    let image = place.image("disk.img", 4 << 20);
    let device = place.set_up(&["-L", "-o", "1M", "--sizelimit", "1M", &image]);
    assert_eq!(place.set_up(&["-L", "-o", "1M", "--sizelimit", "1M", &image]), device);
    for words in [&[][..], &["-o", "1M"], &["-o", "1536K", "--sizelimit", "1M"]] {
        let line = place.losetup_refused(&[&["-L", "-f"], words, &[&image]].concat());
        assert!(line.contains(&format!("it is attached as {device} with offset 1048576")), "{line}");
    }
    let beside = place.set_up(&["-L", "-o", "2M", &image]);
    assert_ne!(beside, device);
    place.losetup(&["-D"]);
    // As the original: whoever wants to write is not given what is read-only.
    let device = place.set_up(&["-L", "-r", &image]);
    assert!(place.losetup_refused(&["-L", "-f", &image]).contains("for reading only"));
    assert_eq!(place.set_up(&["-L", "-r", &image]), device);
    assert!(place.losetup_refused(&["-L", "-r", "-b", "4096", "-f", &image]).contains("sectors of 512"));
    // It stays for those who were told of it.
    place.done(&["set", &device, "autoclear=on"]);
    assert_eq!(place.column(&device, "AUTOCLEAR"), "1");
    assert_eq!(
        place.done(&["attach", "--nooverlap", "--read-only", &image]),
        format!("{}\n", place.uri(&device))
    );
    assert_eq!(place.column(&device, "AUTOCLEAR"), "0");
    assert!(place.refused(&["attach", "--nooverlap", "ram:1M"]).contains("is for images"));
    assert!(place.refused(&["attach", "--nooverlap", "/nonexistent"]).contains("cannot find the image"));
}

#[test]
fn autoclear_ends_a_device_with_its_last_client() {
    let place = Place::new("l-clear");
    let image = place.image("disk.img", 1 << 20);
    let uri = place.done(&["attach", &image, "--autoclear"]).trim().to_owned();
    let pid = place.pid("disk.img");
    // Who only looks what there is was no client.
    drop(client(&uri));
    wait_until("the visitor has gone", || {
        place.json(&["show", "disk.img", "--json"])["clients"].as_array().unwrap().is_empty()
    });
    assert_eq!(place.column("disk.img", "AUTOCLEAR"), "1");
    assert!(io(&uri, "write -P 3 0 64k"));
    wait_until("the device ends", || is_gone(pid) && place.files().is_empty());
    let mut written = [0; 512];
    fs::File::open(&image).unwrap().read_exact_at(&mut written, 0).unwrap();
    assert_eq!(written, [3; 512]);
    // Switched on with a client there, it waits for that; switched off, nothing happens.
    let uri = place.done(&["attach", &image]).trim().to_owned();
    let pid = place.pid("disk.img");
    let hold = format!(
        "import nbd, sys; h = nbd.NBD(); h.connect_uri({uri:?}); print(1, flush=True); sys.stdin.read()"
    );
    let mut client = Command::new("/usr/bin/python3")
        .args(["-c", &hold])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Read::read_exact(client.stdout.as_mut().unwrap(), &mut [0; 2]).unwrap();
    assert!(io(&uri, "read 0 4k"));
    place.done(&["set", "disk.img", "autoclear=on"]);
    assert!(place.losetup_refused(&["-d", "disk.img"]).contains("1 client is connected"));
    place.done(&["set", "disk.img", "autoclear=off"]);
    place.done(&["set", "disk.img", "autoclear=on"]);
    assert!(place.refused(&["set", "disk.img", "autoclear=maybe"]).contains("on or off"));
    drop(client.stdin.take());
    client.wait().unwrap();
    wait_until("the device ends", || is_gone(pid) && place.files().is_empty());
    // Without it a device outlives its clients.
    let uri = place.done(&["attach", &image]).trim().to_owned();
    assert!(io(&uri, "read -P 3 0 64k"));
    place.done(&["show", "disk.img"]);
}

#[test]
fn detach_is_not_lazy_and_goes_on_after_a_refusal() {
    let place = Place::new("l-detach");
    let names: Vec<String> =
        ["a", "b", "c"].iter().map(|name| place.set_up(&[&place.image(name, 1 << 20)])).collect();
    let connected = client(&place.uri("b"));
    wait_until("the client is counted", || {
        !place.json(&["show", "b", "--json"])["clients"].as_array().unwrap().is_empty()
    });
    let output = place.run(&["losetup", "-v", "-d", "a", "b", "nothing", "c"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.lines().count()), (Some(1), 4), "{text}");
    assert!(text.starts_with("a: detached\nblkq: losetup: detach b: 1 client is connected"), "{text}");
    assert!(text.ends_with("c: detached\n"), "{text}");
    assert_eq!(place.losetup(&["-n", "-O", "NAME"]), "b\n");
    assert_eq!(place.run(&["losetup", "-D"]).status.code(), Some(1));
    drop(connected);
    wait_until("the client has gone", || place.run(&["losetup", "-D"]).status.success());
    assert!(place.files().is_empty());
    assert_eq!(names.len(), 3);
}

#[test]
fn what_has_no_meaning_here_is_refused_in_one_line() {
    let place = Place::new("l-refused");
    let image = place.image("disk.img", 1 << 20);
    for (words, says) in [
        (&["-f"][..], "give the file as well: -f --show FILE"),
        (&["--remove", "x"], "use -d"),
        (&["/dev/loop0", &image], "or use -f"),
        (&["/dev/ublkb0", &image], "or use -f"),
        (&["--loop-ref", "a", "b", &image], "leave one of them away"),
        (&["--loop-ref", "a/b", "-f", &image], "a name consists of"),
        (&["/dev/loop0"], "kernel's loop driver"),
        (&["-d", "/dev/loop0"], "kernel's loop driver"),
        (&["nothing"], "no such device"),
        (&["-f", "null:1M"], "cannot find the image"),
        (&["-f", "/dev/null"], "a character device"),
        (&["-f", "-o", "100", &image], "multiple of the sector size"),
    ] {
        let line = place.losetup_refused(words);
        assert!(line.starts_with("blkq: losetup: ") && line.contains(says), "{words:?}: {line}");
    }
    for words in [
        &["a", "b", "c"][..],
        &["-f", "a", "b"],
        &["-a", "-D"],
        &["-D", "x"],
        &["-o", "512"],
        &["-o", "512", "x"],
        &["-r", "-d", "x"],
        &["-L", "x"],
        &["-P"],
        &["-o", "1Q", "-f", &image],
        &["--direct-io=maybe", "-f", &image],
        &["-J", "--raw"],
    ] {
        assert_eq!(place.run(&[&["losetup"], words].concat()).status.code(), Some(2), "{words:?}");
    }
    assert!(place.files().is_empty());
    // A file is a file, also if it is called as a driver is; and a name that is given is taken.
    let odd = place.image("null:1M", 1 << 20);
    let mut command = place.command(&["losetup", "-f", "--show", "null:1M"]);
    assert_eq!(stdout(&command.current_dir(&place.dir).output().unwrap()), "null_1M\n");
    assert_eq!(place.column("null_1M", "BACK-FILE"), odd);
    assert_eq!(place.losetup(&["data", &image]), "");
    assert_eq!(place.column("data", "BACK-FILE"), image);
}

#[test]
fn partition_scan_is_carried_along_and_over_nbd_said_to_be_the_client_s() {
    let place = Place::new("l-part");
    let image = place.image("disk.img", 1 << 20);
    let output = place.run(&["losetup", "-P", "-f", "--show", &image]);
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!((stdout(&output), text.lines().count()), ("disk.img\n".to_owned(), 1));
    assert!(text.contains("the kernel of its client scans them"), "{text}");
    assert_eq!(place.column("disk.img", "PARTSCAN"), "1");
}

#[test]
fn a_daemon_that_does_not_answer_is_told_from_a_device_that_is_not_there() {
    let place = Place::new("l-exit");
    place.done(&["attach", "ram:1M"]);
    assert_eq!(place.losetup(&["ram"]), "ram: []: (ram:1M)\n");
    assert_eq!(place.run(&["losetup", "nothing"]).status.code(), Some(1));
    kill(place.pid("ram"));
    assert_eq!(place.run(&["losetup", "ram"]).status.code(), Some(2));
    assert_eq!(place.run(&["losetup", "ram"]).status.code(), Some(1));
}
