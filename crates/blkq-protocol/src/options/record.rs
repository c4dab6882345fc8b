//! The form of [`AttachOptions`] that is passed to a daemon and stored in the state file and in `show
//! --json`. No option is secret: keys and passphrases are given as the names of files.
//!
//! All options are written, so that a device does not change when a default changes. A program rejects a
//! record of a newer format, or with an unknown option, because it would serve a different device. A new
//! option is `#[serde(default)]` and is omitted if it has its default (`skip_serializing_if`), so that an
//! older program can read the records that it can serve. [`VERSION`] is increased if an option changes its
//! meaning.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::AttachOptions;
use crate::failure::{Failure, Outcome};

/// The version of the format that this program writes.
const VERSION: u32 = 1;

/// Options that any version of blkq may have written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    version: u32,
    options: Value,
}

impl Record {
    pub fn new(options: &AttachOptions) -> Outcome<Record> {
        let options = serde_json::to_value(options).map_err(|e| Failure::new(format!("options: {e}")))?;
        Ok(Record { version: VERSION, options })
    }

    /// The error names the option that this program does not understand.
    pub fn read(&self) -> Outcome<AttachOptions> {
        if self.version != VERSION {
            return Err(Failure::new(format!(
                "the options of the device have format {}, but this version of blkq reads format {VERSION}; use the version that attached the device, or a newer one",
                self.version
            )));
        }
        let options = AttachOptions::deserialize(&self.options).map_err(|e| {
            // serde appends the names of all options, which would be too long.
            let text = e.to_string();
            Failure::new(text.split(", expected").next().unwrap_or_default())
        });
        let checked = options.and_then(|options: AttachOptions| options.check().map(|()| options));
        checked.map_err(|e| e.during("this version of blkq does not understand the options of the device"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::harness::options;

    fn round_trip(words: &[&str]) -> Record {
        let options = options(words);
        let record = Record::new(&options).unwrap();
        assert_eq!(record.read(), Ok(options));
        record
    }

    #[test]
    fn options_survive_a_round_trip() {
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

    #[test]
    fn a_group_that_an_older_program_named_none_is_read() {
        let mut record = Record::new(&options(&["d.img", "--group=g"])).unwrap();
        record.options["group"] = json!("none");
        assert_eq!(record.read().map(|options| options.group), Ok(Some("none".to_owned())));
        assert!(super::super::parse_new_group_name("none").is_err());
    }

    /// Older programs require the key, and an upgrade may fall back to one.
    #[test]
    fn a_removed_option_is_written_for_older_programs() {
        for (words, pacing) in [(&["d.img"][..], true), (&["d.img", "--no-pacing"], false)] {
            let record = Record::new(&options(words)).unwrap();
            assert_eq!(record.options["pacing"], json!(pacing));
            assert_eq!(record.read(), Ok(options(words)));
        }
    }

    #[test]
    fn a_path_that_is_not_utf8_survives_a_round_trip() {
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
            assert!(
                why.starts_with("this version of blkq does not understand the options of the device: "),
                "{why}"
            );
        }
        assert!(why(&|record| record.options = json!([])).contains("does not understand"));
        let without = |record: &mut Record| drop(record.options.as_object_mut().unwrap().remove("depth"));
        assert!(why(&without).contains("depth"));
    }
}
