//! [`AttachOptions`] as they go to a daemon, into the state file and into `show --json`.
//!
//! All options are written, so that a device keeps what it has when a default changes. A program
//! rejects a record of a later format, and one with an option that it does not know: what it would
//! serve were another device. An option that a later program adds is `#[serde(default)]`, and left
//! out where it has that default (`skip_serializing_if`), so that the program before reads what it
//! can serve. [`VERSION`] is raised if an option changes its meaning. Nothing secret is an option:
//! a key or a passphrase is named by the file that it is in.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::AttachOptions;
use crate::failure::{Failure, Outcome};

/// The format that this program writes.
const VERSION: u32 = 1;

/// Options of some version of blkq.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    options: Value,
}

impl Record {
    /// Of these options.
    ///
    /// # Errors
    /// If they cannot be written as JSON.
    pub fn new(options: &AttachOptions) -> Outcome<Record> {
        let options = serde_json::to_value(options).map_err(|e| Failure::new(format!("options: {e}")))?;
        Ok(Record { version: VERSION, options })
    }

    /// The options, checked.
    ///
    /// # Errors
    /// The option that this program does not understand.
    pub fn read(&self) -> Outcome<AttachOptions> {
        if self.version != VERSION {
            return Err(Failure::new(format!(
                "its options have format {}, and this blkq reads format {VERSION}; use the blkq that attached it, or a later one",
                self.version
            )));
        }
        let options = AttachOptions::deserialize(&self.options).map_err(|e| {
            // Without the names of all options that there are.
            let text = e.to_string();
            Failure::new(text.split(", expected").next().unwrap_or_default())
        });
        let checked = options.and_then(|options: AttachOptions| options.check().map(|()| options));
        checked.map_err(|e| e.during("its options are not understood by this blkq"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::options;
    use super::*;

    fn round_trip(words: &[&str]) -> Record {
        let options = options(words);
        let record = Record::new(&options).unwrap();
        assert_eq!(record.read(), Ok(options));
        record
    }

    #[test]
    fn options_come_back_as_they_were() {
        round_trip(&["null:1T"]);
        let record = round_trip(&[
            "d.img",
            "--name=n",
            "--export=ublk",
            "--export=nbd",
            "--listen=unix:/s",
            "--listen=tcp:[::1]:0",
            "--export=vhost-user-blk",
            "--vhost-socket=/v",
            "--register-memory",
            "--socket-mode=060",
            "--socket-group=g",
            "--read-only",
            "--shared",
            "--format=raw",
            "--autoclear",
            "--no-partscan",
            "--offset=1M",
            "--size-limit=2M",
            "--sector-size=4096",
            "--direct-io=on",
            "--dispatch=serial",
            "--queues=2",
            "--depth=64",
            "--threads-per-queue=3",
            "--copy=user",
            "--scheduler=mq-deadline",
            "--no-merge",
            "--no-batching",
            "--no-early-submission",
            "--no-iostats",
            "--no-receive-backoff",
            "--no-split-reads",
            "--clock=precise",
            "--fault=delay=1ms,op=write;seed=7",
            "--limit=read-iops=500,burst=2000x10s",
            "--group=g",
            "--weight=7",
            "--on-error=hold",
            "--unsafe-flush-ignore",
            "--hang-warning=0.5",
            "--metrics=unix:/m",
            "--max-connections=8",
            "--handshake-timeout=20",
            "--tls=require",
            "--tls-certificates=/tls",
            "--insecure",
            "--no-sandbox",
            "--export-name=e",
            "--pid-file=/p",
            "--whole-sectors",
        ]);
        round_trip(&["d.qcow2", "--format=qcow2", "--backing-chain=allow"]);
        round_trip(&["rbd:p/n/i@s", "--ceph-conf=/c", "--ceph-keyring=/k", "--ceph-user=u", "--shared"]);
        let mut options = options(&["d.img"]);
        options.image = blkq_drivers::DriverSpec::Image("rbd:p/i".into());
        assert_eq!(Record::new(&options).unwrap().options["image"], json!("./rbd:p/i"));
        for (key, value) in [
            ("image", json!("d.img")),
            ("socket_mode", json!("060")),
            ("partscan", json!(false)),
            ("sector_size", json!("4096")),
            ("merge", json!(false)),
            ("hang_warning", json!(0.5)),
        ] {
            assert_eq!(record.options[key], value, "{key}");
        }
    }

    /// Earlier programs require the key, and an upgrade may fall back to one.
    #[test]
    fn a_removed_option_is_written_for_older_programs() {
        for (words, pacing) in [(&["d.img"][..], true), (&["d.img", "--no-pacing"], false)] {
            let record = Record::new(&options(words)).unwrap();
            assert_eq!(record.options["pacing"], json!(pacing));
            assert_eq!(record.read(), Ok(options(words)));
        }
    }

    #[test]
    fn a_path_that_is_not_text_comes_back() {
        use std::os::unix::ffi::OsStringExt;
        let mut options = options(&["d.img"]);
        let path = std::ffi::OsString::from_vec(vec![b'/', 0xff]);
        options.image = blkq_drivers::DriverSpec::Image(path.into());
        let text = serde_json::to_string(&Record::new(&options).unwrap()).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap().read(), Ok(options));
    }

    #[test]
    fn an_unknown_record_is_rejected_in_one_short_line() {
        let whole = Record::new(&options(&["d.img"])).unwrap();
        let why = |change: &dyn Fn(&mut Record)| {
            let mut record = whole.clone();
            change(&mut record);
            let why = record.read().unwrap_err().to_string();
            assert!(why.len() < 200, "{why}");
            why
        };
        assert!(why(&|record| record.version = 2).contains("have format 2"));
        for (key, value) in [
            ("overlay", json!("/o")),
            ("depth", json!(0)),
            ("depth", json!("x")),
            ("queues", json!(65)),
            ("threads_per_queue", json!(0)),
            ("threads_per_queue", json!(65)),
            ("max_connections", json!(0)),
            ("handshake_timeout", json!(3601)),
            ("image", json!("ram:0")),
            ("image", json!("")),
            ("hang_warning", json!(-1)),
            ("limit", json!("iops=0")),
            ("on_error", json!("stop")),
            ("group", json!("../g")),
            ("weight", json!(0)),
            ("export_name", json!("")),
            ("socket_mode", json!("999")),
            ("tls", json!("require")),
            ("backing_chain", json!("allow")),
            ("ceph_user", json!("u")),
            ("ceph_conf", json!("/c")),
            ("ceph_keyring", json!("/k")),
            ("image", json!("rbd:i")),
        ] {
            let why = why(&|record| record.options[key] = value.clone());
            assert!(why.starts_with("its options are not understood by this blkq: "), "{why}");
        }
        assert!(why(&|record| record.options = json!([])).contains("not understood"));
        let without = |record: &mut Record| drop(record.options.as_object_mut().unwrap().remove("depth"));
        assert!(why(&without).contains("depth"));
    }
}
