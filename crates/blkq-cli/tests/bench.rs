//! `blkq bench` as a user runs it: the JSON documents, the counters that prove each mechanism, and files
//! that must not be left over. No test asserts a speed.

use blkq::testing::wait_until;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const BENCH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../blkq-bench");

/// A directory on a disk. The directory of temporary files may be a tmpfs, which has no direct I/O.
struct Place(PathBuf);

impl Place {
    fn new(test: &str) -> Place {
        let base = std::env::var_os("BLKQ_BENCH_DIR")
            .map_or_else(|| env!("CARGO_TARGET_TMPDIR").into(), PathBuf::from);
        let place = base.join(format!("bench-{}-{test}", std::process::id()));
        fs::create_dir(&place).unwrap();
        Place(place)
    }

    /// The command under test: $BLKQ, or the program of this build.
    fn command(&self, words: &[&str]) -> Command {
        let program = std::env::var_os("BLKQ").unwrap_or_else(|| env!("CARGO_BIN_EXE_blkq").into());
        let mut command = Command::new(program);
        command.arg("bench").args(words).current_dir(&self.0).stdin(Stdio::null());
        command.env("BLKQ_STATE_DIR", self.0.join("state"));
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    fn done(&self, words: &[&str]) -> Output {
        let output = self.run(words);
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// Returns the single error line of a command that must fail before it measures anything.
    fn refused(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{words:?}: {line}");
        assert!(line.starts_with("blkq: bench: ") && line.lines().count() == 1, "{words:?}: {line:?}");
        line
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn against_schema(document: &Value) -> Result<(), String> {
    let (mut schemas, mut compiler) = (boon::Schemas::new(), boon::Compiler::new());
    compiler.set_default_draft(boon::Draft::V2020_12);
    let schema = compiler.compile(&format!("{BENCH}/schema.json"), &mut schemas).unwrap();
    schemas.validate(document, schema).map_err(|e| format!("{e:#}"))
}

fn parse(text: impl AsRef<[u8]>) -> Value {
    let document = serde_json::from_slice(text.as_ref()).unwrap();
    if let Err(e) = against_schema(&document) {
        panic!("not as in schema.json: {e}");
    }
    document
}

fn array(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

/// All mechanisms of all tables: the claim, the counter, and whether the claim was seen.
fn mechanisms(document: &Value) -> Vec<(String, f64, bool)> {
    let of = |table: &Value| array(&table["mechanisms"]).to_vec();
    let mechanisms = array(&document["tables"]).iter().flat_map(of);
    let read = |table: &Value| {
        let claim = table["claim"].as_str().unwrap().to_owned();
        (claim, table["value"].as_f64().unwrap(), table["seen"].as_bool().unwrap())
    };
    mechanisms.map(|mechanism| read(&mechanism)).collect()
}

fn unseen(document: &Value) -> Vec<(String, f64, bool)> {
    mechanisms(document).into_iter().filter(|(_, _, seen)| !seen).collect()
}

fn all_seen(document: &Value) {
    let unseen = unseen(document);
    assert!(unseen.is_empty(), "mechanisms that were not seen: {unseen:#?}");
}

/// Other load on the machine may hide a mechanism that depends on the order of waiting: a table that
/// does not show its mechanisms is run again, at most twice.
fn all_seen_in_the_end(place: &Place, document: &Value) {
    for table in array(&document["tables"]) {
        let mut alone = serde_json::json!({ "tables": [table] });
        for _ in 0..2 {
            let unseen = unseen(&alone);
            if unseen.is_empty() {
                break;
            }
            println!("again, as not seen: {unseen:#?}");
            alone = parse(place.done(&[table["name"].as_str().unwrap(), "--quick", "--json", "-"]).stdout);
        }
        all_seen(&alone);
    }
}

#[test]
fn the_schema_takes_what_it_should_and_nothing_else() {
    let mut document = parse(fs::read(format!("{BENCH}/tests/hostile.json")).unwrap());
    document["tables"][0]["mechanisms"][0]["value"] = Value::Null;
    assert!(against_schema(&document).is_err(), "a counter without a value");
    document["tables"][0]["mechanisms"][0]["value"] = 1.0.into();
    against_schema(&document).unwrap();
    document["tables"][0]["more"] = 1.into();
    assert!(against_schema(&document).is_err(), "a property that is not described");
}

#[test]
fn standard_output_is_json_alone_and_nothing_is_left() {
    let place = Place::new("json");
    let document = parse(place.done(&["clock", "--quick", "--json", "-"]).stdout);
    assert_eq!(document["quick"], true);
    assert_eq!(document["tables"][0]["name"], "clock");
    all_seen(&document);
    assert_eq!(place.files(), [""; 0]);
}

#[test]
fn a_report_has_its_figures_beside_it_and_keeps_other_pages() {
    let place = Place::new("report");
    let output = place.done(&["clock", "--quick", "--report", "out/page", "--json", "figures.json"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("published x 1.10") && text.contains("out/page/index.html"), "{text}");
    assert_eq!(place.files(), ["figures.json", "out"]);
    let json = fs::read(place.0.join("out/page/results.json")).unwrap();
    parse(&json);
    // The next run recognises by this mark that it may replace the files.
    assert!(json.starts_with(b"{\n  \"schema\": "));
    assert_eq!(json, fs::read(place.0.join("figures.json")).unwrap());
    assert!(fs::read_to_string(place.0.join("out/page/results.csv")).unwrap().starts_with("table,part,"));

    fs::create_dir(place.0.join("site")).unwrap();
    fs::write(place.0.join("site/index.html"), "dear").unwrap();
    assert!(
        place
            .refused(&["clock", "--quick", "--report", "site"])
            .contains("index.html: the file contains other data")
    );
    assert_eq!(fs::read(place.0.join("site/index.html")).unwrap(), b"dear");
}

#[test]
fn what_cannot_be_measured_or_written_fails_at_once_in_one_line() {
    let place = Place::new("refused");
    fs::write(place.0.join("dear"), "content").unwrap();
    fs::write(place.0.join("other.json"), "{\n  \"name\": 1\n}\n").unwrap();
    for (words, why) in [
        (&["peak", "--file", "dear"][..], "--overwrite"),
        (&["peak", "--file", "."], "not a regular file"),
        (&["peak", "--file", "/dev/null"], "not a regular file"),
        (&["peak", "--file", "none/file"], "No such file"),
        (&["peak", "--file", "/proc/file"], "--file"),
        (&["peak", "--size", "1"], "--size"),
        (&["clock", "--json", "none/file"], "none/file"),
        (&["clock", "--json", "dear"], "contains other data"),
        (&["clock", "--json", "other.json"], "contains other data"),
        (&["clock", "--report", "dear"], "dear"),
    ] {
        let line = place.refused(words);
        assert!(line.contains(why), "{words:?}: {line}");
    }
    assert_eq!(place.files(), ["dear", "other.json"]);
    assert_eq!(fs::read(place.0.join("dear")).unwrap(), b"content");
}

#[test]
fn an_interrupt_removes_the_file_and_exits_with_130() {
    let place = Place::new("interrupt");
    let words = ["peak", "--quick", "--size", "64M"];
    let mut child = place.command(&words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("a file is made", || {
        assert!(child.try_wait().unwrap().is_none(), "blkq bench has exited");
        !place.files().is_empty()
    });
    // SAFETY: the process is a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let mut printed = String::new();
    child.stderr.take().unwrap().read_to_string(&mut printed).unwrap();
    assert!(!printed.contains("blkq: "), "{printed}");
    assert_eq!(place.files(), [""; 0]);
}

/// Takes two minutes, or more on a debug build or a busy machine: `./check` runs it on the release build.
/// Writes the report to $BLKQ_BENCH_REPORT, if that is set.
#[test]
#[ignore = "long: ./check runs it with the release build"]
fn every_table_shows_its_mechanism() {
    let place = Place::new("all");
    let report = std::env::var("BLKQ_BENCH_REPORT").unwrap_or_else(|_| "report".to_owned());
    place.done(&["all", "--quick", "--json", "figures.json", "--report", &report]);
    let document = parse(fs::read(place.0.join("figures.json")).unwrap());
    all_seen_in_the_end(&place, &document);
    let tables: Vec<&str> =
        array(&document["tables"]).iter().map(|table| table["name"].as_str().unwrap()).collect();
    let claims = mechanisms(&document);
    assert_eq!(tables.len(), 8, "{tables:?}");
    for (table, words, is_true) in NAMED {
        let named: Vec<_> =
            claims.iter().filter(|(claim, ..)| words.iter().all(|w| claim.contains(w))).collect();
        assert!(!named.is_empty(), "{table} claims nothing of {words:?}");
        for (claim, value, _) in named {
            assert!(is_true(*value), "{claim}: {value}");
        }
    }
    let file_system = document["machine"]["file_system"].as_str().unwrap();
    assert!(file_system.contains(' '), "{file_system}");
    let left: Vec<_> =
        place.files().into_iter().filter(|name| name != "figures.json" && *name != report).collect();
    assert_eq!(left, [""; 0]);
}

/// A table, words of a claim, and the condition that the counter must meet.
type Named = (&'static str, &'static [&'static str], fn(f64) -> bool);

/// Claims that must exist. Their conditions do not depend on the bounds that the tables set.
const NAMED: &[Named] = &[
    ("dispatch", &["randread, concurrent: mean reads in flight"], |reads| reads > 1.0),
    ("dispatch", &["maximum concurrent writers"], |writers| writers == 1.0),
    ("direct", &["direct: maximum MiB of the file in the page cache"], |mib| mib <= 1.0),
    ("batching", &["on: largest batch admitted, in requests"], |requests| (1.0..=32.0).contains(&requests)),
    ("clock", &["cached: clock readings"], |reads| reads <= 2.5 / 32.0),
    ("clock", &["precise: clock readings"], |reads| reads >= 2.0),
    ("clock", &["iostats off: clock readings"], |reads| reads == 0.0),
];
