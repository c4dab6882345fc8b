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
use super::mechanisms::{EARLIER, NONE, WITHOUT, Without};
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
        let mut record = serde_json::to_value(options).map_err(|e| Failure::new(format!("options: {e}")))?;
        write_without(&options.without, &mut record);
        Ok(Record { version: VERSION, options: record })
    }

    /// The error names the option that this program does not understand.
    pub fn read(&self) -> Outcome<AttachOptions> {
        if self.version != VERSION {
            return Err(Failure::new(format!(
                "the options of the device have format {}, but this version of blkq reads format {VERSION}; use the version that attached the device, or a newer one",
                self.version
            )));
        }
        let mut record = self.options.clone();
        let without = read_without(&mut record)?;
        let options = AttachOptions::deserialize(record).map_err(|e| {
            // serde appends the names of all options, which would be too long.
            let text = e.to_string();
            Failure::new(text.split(", expected").next().unwrap_or_default())
        });
        let options = options.map(|options| AttachOptions { without, ..options });
        let checked = options.and_then(|options| options.check().map(|()| options));
        checked.map_err(|e| e.during("this version of blkq does not understand the options of the device"))
    }
}

/// Writes the switches of earlier versions as these do, because an upgrade falls back to the old program if the new one
/// does not start.
fn write_without(without: &Without, record: &mut Value) {
    let mut rest = without.clone();
    for (option, mechanism) in EARLIER {
        record[key_of(option)] = mechanism.is_none_or(|mechanism| !without.includes(mechanism)).into();
        mechanism.into_iter().for_each(|mechanism| rest.switch(mechanism, true));
    }
    if rest != Without::default() {
        record[WITHOUT] = rest.to_string().into();
    }
}

fn read_without(record: &mut Value) -> Outcome<Without> {
    let mut take = |key: &str| record.as_object_mut().and_then(|record| record.remove(key));
    let text = take(WITHOUT);
    let text = text.as_ref().and_then(Value::as_str).unwrap_or(NONE);
    let mut without: Without = text.parse().map_err(Failure::new)?;
    for (option, mechanism) in EARLIER {
        if let (Some(Value::Bool(false)), Some(mechanism)) = (take(&key_of(option)), mechanism) {
            without.switch(mechanism, false);
        }
    }
    Ok(without)
}

fn key_of(option: &str) -> String {
    option.trim_start_matches("no-").replace('-', "_")
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
            "--no-iostats",
            "--without=early-submission,huge-pages,receive-backoff,split-reads",
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

    /// Earlier programs require some of these keys, and an upgrade may fall back to one.
    #[test]
    fn mechanisms_are_written_as_earlier_programs_wrote_them() {
        let keys = ["early_submission", "pacing", "receive_backoff", "split_reads"];
        for (words, values, rest) in [
            (&["d.img"][..], [true, true, true, true], None),
            (&["d.img", "--no-pacing"], [true, true, true, true], None),
            (&["d.img", "--no-receive-backoff"], [true, true, false, true], None),
            (
                &["d.img", "--without=huge-pages,split-reads", "--no-early-submission"],
                [false, true, true, false],
                Some("huge-pages"),
            ),
        ] {
            let record = round_trip(words);
            assert_eq!(keys.map(|key| record.options[key].as_bool().unwrap()), values, "{words:?}");
            assert_eq!(record.options["without"].as_str(), rest);
        }
        let without =
            options(&["d.img", "--without", "huge-pages,split-reads", "--no-early-submission"]).without;
        assert_eq!(without.to_string(), "early-submission,huge-pages,split-reads");
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
