//! A state directory with arbitrary files. All names must be found, and devices without a running daemon must be cleared;
//! nothing else may change. The description of a block device in a state file must be accepted, or rejected with one
//! line. A state file that was written by an engine that an attacker controls may only choose one of the images that the
//! command recorded, or none; it gives no other rights.
//!
//! Input: files, each `[kind, length, length, content]`: of a device `a` or `b`, or with a name from the input that is
//! short enough for a socket. Depending on the kind, the content is used as it is, or as choices from which a state is
//! generated and then damaged.
// Contract: bounded-input

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::LazyLock;

use arbitrary::{Result, Unstructured};
use blkq_cli::commands::attach::Args;
use blkq_cli::commands::recover::attach_options;
use blkq_cli::devices::{Entry, all};
use blkq_protocol::options::{Record, SettingGroups};
use blkq_protocol::state::{
    Dead, OptionsFile, STATE_DIR_VARIABLE, StateDir, check_name, parse_daemon_state, parse_state,
};
use serde_json::{Map, Value, json};

use crate::lines;

const ENDINGS: [&str; 9] =
    [".lock", ".json", ".json.new", ".log", ".control", ".nbd", ".options", ".options.new", ".other"];

static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let directory = std::env::temp_dir().join(format!("blkq-fuzz-state-{}", std::process::id()));
    // SAFETY: no other thread reads or writes the environment yet.
    unsafe { std::env::set_var(STATE_DIR_VARIABLE, &directory) };
    directory
});

/// A recorded device with two images and a kernel block device.
static RECORDED: LazyLock<(Value, Vec<Record>)> = LazyLock::new(|| {
    let record = |image: &str| {
        let words = [image, "--export", "vhost-user-blk", "--fault", "none"].map(OsString::from);
        let options = Args::options_from_words(&words).expect("options");
        Record::new(&options).expect("options are JSON")
    };
    let records = vec![record("/first"), record("/second")];
    let image = |number: usize| json!({ "number": number, "path": "/image", "options": records[number] });
    (json!({ "version": 1, "ublk": 7, "images": [image(0), image(1)] }), records)
});

fn any(u: &mut Unstructured<'_>) -> Result<Value> {
    Ok(match u.int_in_range(0..=7)? {
        0 => Value::Null,
        1 => json!(u.arbitrary::<bool>()?),
        2 => json!(u.arbitrary::<i64>()?),
        3 => json!(u.arbitrary::<u64>()?),
        4 => json!(u.arbitrary::<f64>()?),
        5 => json!(text(u)?),
        6 => json!([any(u)?]),
        _ => json!({ text(u)?: any(u)? }),
    })
}

fn text(u: &mut Unstructured<'_>) -> Result<String> {
    Ok(match u.int_in_range(0..=3)? {
        0 => u.arbitrary::<&str>()?.chars().take(40).collect(),
        _ => {
            (*u.choose(&["", "a", "b", "/a.img", "null:1G", "ram:1M", "/dev/ublkb0", "depth", "64", "on"])?)
                .to_owned()
        }
    })
}

fn damage(u: &mut Unstructured<'_>, object: &mut Map<String, Value>) -> Result<()> {
    let keys: Vec<String> = object.keys().cloned().collect();
    let key = u.choose(&keys)?;
    match u.int_in_range(0..=3)? {
        0 => drop(object.remove(key)),
        1 => drop(object.insert(key.clone(), any(u)?)),
        2 => drop(object.insert(text(u)?, any(u)?)),
        _ => {
            if let Some(Value::Object(inner)) = object.get_mut(key) {
                damage(u, inner)?;
            }
        }
    }
    Ok(())
}

/// The text of a state file whose options are in a separate file.
fn made_by_daemon(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let settings = (0..u.int_in_range(0..=3)?).map(|_| Ok((text(u)?, json!(text(u)?))));
    let settings: Map<String, Value> = settings.collect::<Result<_>>()?;
    let mut state = Map::from_iter([
        ("pid".to_owned(), json!(u.arbitrary::<u32>()?)),
        ("image".to_owned(), json!(u.int_in_range(0..=2)?)),
        ("exports".to_owned(), json!([text(u)?])),
        ("settings".to_owned(), json!(settings)),
    ]);
    for _ in 0..u.int_in_range(0..=2)? {
        damage(u, &mut state)?;
    }
    Ok(serde_json::to_vec(&state).expect("strings and numbers"))
}

fn made(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    if u.ratio(1, 3)? {
        return made_by_daemon(u);
    }
    let settings = (0..u.int_in_range(0..=3)?).map(|_| Ok((text(u)?, json!(text(u)?))));
    let settings: Map<String, Value> = settings.collect::<Result<_>>()?;
    let mut state = Map::from_iter([
        ("name".to_owned(), json!(text(u)?)),
        ("pid".to_owned(), json!(u.arbitrary::<u32>()?)),
        ("image".to_owned(), json!(text(u)?)),
        ("exports".to_owned(), json!([text(u)?])),
        ("settings".to_owned(), json!(settings)),
    ]);
    if u.ratio(3, 4)? {
        let [mut words, _] = lines::line(u, Some("attach"))?;
        if u.ratio(1, 2)? {
            let line: Vec<OsString> = words[1..].iter().map(OsString::from).collect();
            if let Ok(options) = Args::options_from_words(&line) {
                let record = Record::new(&options).expect("options are JSON");
                assert_eq!(record.read(), Ok(options));
                state.insert("attach_options".to_owned(), json!(record));
            }
            words.truncate(1);
        }
        // A device number that no kernel has assigned here.
        let ublk = json!({ "id": u32::MAX, "cookie": u.arbitrary::<u64>()?, "words": words[1..], "directory": text(u)? });
        state.insert("ublk".to_owned(), ublk);
    }
    let whole =
        parse_state(&serde_json::to_vec(&state).expect("strings and numbers")).expect("a whole state");
    assert_eq!(serde_json::to_value(&whole).expect("a state"), Value::Object(state.clone()));
    for _ in 0..u.int_in_range(0..=2)? {
        damage(u, &mut state)?;
    }
    let mut text = serde_json::to_vec(&state).expect("strings and numbers");
    if u.ratio(1, 8)? {
        text.truncate(u.int_in_range(0..=text.len())?);
    }
    Ok(text)
}

/// Checks a state file of a daemon that an attacker may control.
fn hostile_state(text: &[u8]) {
    let (recorded, records) = &*RECORDED;
    let recorded = OptionsFile::parse(recorded.to_string().as_bytes()).expect("whole");
    let state = recorded.with_state("a", parse_daemon_state(text));
    assert_eq!((state.name.as_str(), state.ublk.as_ref().map(|ublk| ublk.cookie)), ("a", Some(7)));
    assert!(state.exports.len() <= 64 && state.settings.len() <= 64);
    let Some(record) = &state.attach_options else { return };
    assert!(records.contains(record));
    let options = record.read().expect("a record of ours");
    for (key, value) in &state.settings {
        if let Err(failure) = SettingGroups::new(&options).read(key, value) {
            assert!(!failure.to_string().contains('\n'));
        }
    }
}

fn state(text: &[u8]) {
    hostile_state(text);
    if let Ok(options) = OptionsFile::parse(text) {
        let state = options.with_state("a", parse_daemon_state(br#"{"pid":1,"image":0,"exports":[]}"#));
        let _ = state.guest_options();
    }
    let Some(state) = parse_state(text) else { return };
    let again = serde_json::to_vec(&state).expect("a state");
    assert_eq!(parse_state(&again).as_ref(), Some(&state));
    match attach_options(&state) {
        Ok(options) => assert!(state.ublk.is_some() && options.depth > 0 && options.queues > 0),
        Err(failure) => assert!(!failure.to_string().contains('\n')),
    }
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let directory = &*DIRECTORY;
    let _ = fs::remove_dir_all(directory);
    let dir = StateDir::locate().expect("a place");
    dir.create().expect("a directory");
    let mut kept = Vec::new();
    let mut rest = data;
    while let [kind, high, low, after @ ..] = rest {
        let length = usize::from(u16::from_be_bytes([*high, *low])).min(after.len());
        let (content, next) = after.split_at(length);
        rest = next;
        let made = (kind >> 6 == 1).then(|| made(&mut Unstructured::new(content)).unwrap_or_default());
        let content = made.as_deref().unwrap_or(content);
        state(content);
        let ending = ENDINGS[usize::from(*kind) % ENDINGS.len()];
        let name = match kind >> 6 {
            0 | 1 => "a".to_owned(),
            2 => "b".to_owned(),
            _ => String::from_utf8_lossy(&content[..content.len().min(40)]).replace(['/', '\0'], "_"),
        };
        let file = dir.file(&name, ending);
        let written = fs::write(&file, content).is_ok();
        // Like the state file of a daemon whose options are in a separate file.
        if ending == ".json" && kind & 32 != 0 {
            let _ = fs::set_permissions(&file, fs::Permissions::from_mode(0o400));
        }
        if written && (ending == ".other" || check_name(&name).is_err()) {
            kept.push(file);
        }
    }
    let names = dir.names().expect("a directory that can be read");
    assert!(names.iter().all(|name| check_name(name).is_ok()));
    // No process holds a lock and no kernel device exists, so no device is running.
    for entry in all(&dir).expect("a directory that can be read") {
        assert!(!matches!(entry, Entry::Device(_)), "{entry:?}");
    }
    assert_eq!(dir.names().expect("nothing changed"), names);
    for name in &names {
        assert!(matches!(dir.clear_dead(name), Ok(Dead::Cleared(_))), "{name}");
    }
    assert_eq!(dir.names().expect("as before"), <[String; 0]>::default());
    for name in names {
        for ending in &ENDINGS[..8] {
            assert!(!dir.file(&name, ending).exists(), "{name}{ending} is left");
        }
        // The name can be used again, and no file is left.
        if let Ok(claim) = dir.claim(&name) {
            claim.write_state(&"x").expect("a file");
        }
    }
    for file in kept {
        assert!(file.exists(), "{} was not a device's", file.display());
    }
}
