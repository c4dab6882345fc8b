//! `blkq losetup` and the devices that it sets up, as users of losetup(8) run it. Some tests carry over what
//! LTP (ioctl_loop04 to 07) and blktests (loop/002, 006, 007) check of the kernel's loop device.

mod changes;
mod detaching;
mod listing;
mod refusals;
mod together;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Output};

use crate::place::*;

impl Place {
    /// Returns the output of a `blkq losetup` that must succeed without a warning.
    fn losetup(&self, words: &[&str]) -> String {
        self.done(&[&["losetup"], words].concat())
    }

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

    fn column(&self, device: &str, column: &str) -> String {
        self.losetup(&["-n", "-O", column, device]).trim().to_owned()
    }

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

/// Whether qemu-io succeeds with `command`. A read with a pattern fails if the data differs.
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
