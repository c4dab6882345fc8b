use blkq_protocol::harness::scratch;
use clap::{ArgAction, Parser};

use super::*;
use crate::commands::Cli;

/// A directory with one file, `d.toml`.
struct Place {
    dir: PathBuf,
}

impl Place {
    fn new(test: &str, text: &str) -> Place {
        let dir = scratch(test).path().to_owned();
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("d.toml"), text).unwrap();
        Place { dir }
    }

    fn path(&self) -> PathBuf {
        self.dir.join("d.toml")
    }

    fn options(&self) -> Result<AttachOptions, Vec<Fault>> {
        ConfigFile::read(&self.path())?.options().map_err(|fault| vec![fault])
    }

    fn settings(&self) -> Vec<(String, String)> {
        ConfigFile::read(&self.path()).unwrap().settings(SettingGroups::new(&self.options().unwrap()))
    }

    /// The words after `attach` that the main function parses if `words` follow --config.
    fn expanded(&self, words: &[&str]) -> Vec<String> {
        let path = self.path();
        let line = [&["blkq", "attach", "--config", path.to_str().unwrap()], words].concat();
        let words =
            expand(line.into_iter().map(Into::into).collect(), <Cli as clap::CommandFactory>::command)
                .unwrap();
        Cli::try_parse_from(&words).unwrap();
        words[2..]
            .iter()
            .map(|word| word.to_str().unwrap().to_owned())
            .filter(|word| word != "--config")
            .collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Values of options, in a file and on the command line. Each option accepts one of these, or has names for
/// its values.
const SAMPLES: [(&str, &str); 9] = [
    ("\"660\"", "660"),
    ("\"/d.img\"", "/d.img"),
    ("0x2", "2"),
    ("\"name\"", "name"),
    ("[\"unix:/s\", \"tcp:[::1]:0\"]", "unix:/s"),
    ("\"unix:/m\"", "unix:/m"),
    ("\"delay=1ms\"", "delay=1ms"),
    ("\"iops=1000\"", "iops=1000"),
    ("\"huge-pages,split-reads\"", "huge-pages,split-reads"),
];

#[test]
fn every_option_of_attach_is_a_key() {
    for argument in words::command().get_arguments().filter(|argument| !argument.is_hide_set()) {
        let key = argument.get_long().unwrap_or(words::IMAGE);
        let is_switch = matches!(argument.get_action(), ArgAction::SetTrue | ArgAction::SetFalse);
        let names = argument.get_possible_values();
        let named = names
            .first()
            .filter(|_| !is_switch)
            .map(|name| (format!("{:?}", name.get_name()), name.get_name()));
        let samples = SAMPLES.iter().map(|(value, word)| ((*value).to_owned(), *word));
        let values = is_switch.then(|| ("true".to_owned(), "")).into_iter().chain(named).chain(samples);
        let read = |(value, word): (String, &str)| {
            words::parse(&format!("{key} = {value}\n")).all().ok().map(|keys| (keys, word.to_owned()))
        };
        let (keys, word) = values.into_iter().find_map(read).unwrap_or_else(|| panic!("no sample for {key}"));
        let expected = match (key, is_switch) {
            (words::IMAGE, _) => word,
            (_, true) => format!("--{key}"),
            _ => format!("--{key}={word}"),
        };
        assert_eq!((keys.len(), &keys[0].words[0]), (1, &expected), "{key}");
        assert_eq!(&keys[0].id, argument.get_id(), "{key}");
    }
}

#[test]
fn a_file_means_the_same_as_a_command_line() {
    let text = "\
# the first line
image = \"/srv/d.img\"
export = [\"nbd\", \"ublk\"]
read-only = true
autoclear = false
no-merge = true
offset = 1_024
hang-warning = 0.5
";
    let words = ["/srv/d.img", "--name=d", "--export=nbd", "--export=ublk", "--read-only", "--no-merge"];
    let more = ["--offset=1024", "--hang-warning=0.5"];
    let expected = blkq_protocol::harness::options(&[&words[..], &more].concat());
    assert_eq!(Place::new("config-same", text).options(), Ok(expected));
}

#[test]
fn keys_that_can_be_changed_live_become_settings() {
    let text =
        "image = \"null:1M\"\ndepth = 3\nno-merge = true\nread-only = true\nautoclear = false\nqueues = 2\n";
    let place = Place::new("config-settings", text);
    let settings = place.settings();
    let expected = [("depth", "3"), ("merge", "off"), ("read-only", "on"), ("autoclear", "off")];
    assert_eq!(settings, expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
    let text = "image = \"null:1M\"\nread-only = false\nno-merge = false\ndirect-io = \"auto\"\nno-split-reads = true\n";
    let place = Place::new("config-unset", text);
    let settings = place.settings();
    // The daemon translates the switches of earlier versions.
    let expected = [("read-only", "off"), ("merge", "on"), ("split-reads", "off")];
    assert_eq!(settings, expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
}

#[test]
fn each_mistake_is_reported_with_its_line() {
    for (text, expected) in [
        ("image = \"null:1M\"\ndepht = 3\n\nread-only = 1\n", "2 depth, 4 must be true or false"),
        ("image = \"null:1M\"\ndepth = 0\nqueues = \"x\"\n", "2 1 to 10240, 3 number from 1 to"),
        ("image = \"null:1M\"\ndepth = \"many\"\n", "2 of depth: must be a number from 1 to 10240"),
        ("image = \"null:1M\"\nweight = 0\n", "2 of weight: must be a number from 1 to 10000"),
        ("image = \"null:1M\"\nscheduler = \"x\"\n", "2 mq-deadline or kyber"),
        ("image = \"null:1M\"\n[depth]\n", "2 table"),
        ("image = \"null:1M\"\ndepth = 99999999999999999999999\n", "2 too large"),
        ("depth = 3\ndepth = 4\n", "2 duplicate"),
        ("depth\n", "1 "),
        ("image = \"null:1M\"\nwhole-sectors = true\n", "2 unknown key"),
        ("image = \"null:1M\"\nfoo = 1\nrun = \"true\"\n", "2 unknown key, 3 unknown key"),
        ("depth = 3\n", "0 the key image is missing"),
        ("image = \"null:1M\"\n\ntls = \"require\"\n", "3 certificates"),
        ("image = \"null:1M\"\npartscan = true\nno-partscan = true\n", "2 cannot be used with"),
        ("image = \"d.img\"\n", "1 absolute"),
        (
            "image = \"null:1M\"\nlisten = [\"tcp:[::1]:0\", \"unix:s\"]\n",
            "2 listen: the path s must be absolute",
        ),
        ("image = \"null:1M\"\n\nmetrics = \"unix:m\"\n", "3 metrics: the path m must be absolute"),
        ("image = \"null:1M\"\npid-file = \"p\"\n", "2 pid-file: the path p must be absolute"),
        ("image = \"/d.img\"\nformat = \"auto\"\n", "2 must be raw or qcow2"),
        ("image = \"null:1M\"\nname = \"d\"\nqueues = 0\n", "3 queues"),
        ("image = \"null:1M\"\nname = \"e\"\n", "2 rename the file"),
        ("image = \"null:1M\"\nname = \"../x\"\n", "0 a name begins"),
        ("image = \"null:1M\"\nlisten = [\"unix:/a\", \"b\"]\n", "2 use unix:PATH or tcp:HOST:PORT"),
    ] {
        let faults = Place::new("config-faults", text).options().unwrap_err();
        let expected: Vec<&str> = expected.split(", ").collect();
        assert_eq!(faults.len(), expected.len(), "{text}{faults:?}");
        for (fault, expected) in faults.iter().zip(expected) {
            let (line, words) = expected.split_once(' ').unwrap();
            assert_eq!(fault.line.to_string(), line, "{text}{fault:?}");
            assert!(fault.text.contains(words) && !fault.text.contains('\n'), "{text}{fault:?}");
        }
    }
}

#[test]
fn the_command_line_overrides_the_file() {
    let text = "image = \"null:1M\"\nexport = [\"nbd\", \"ublk\"]\ndepth = 3\nno-partscan = true\n";
    let place = Place::new("config-override", text);
    let path = place.path().to_str().unwrap().to_owned();
    let whole = ["--name=d", "null:1M", "--export=nbd", "--export=ublk", "--depth=3", "--no-partscan", &path];
    assert_eq!(place.expanded(&[]), whole);
    let words = place.expanded(&["--export=nbd", "--partscan", "ram:1M", "--name", "e"]);
    assert_eq!(words, ["--depth=3", &path, "--export=nbd", "--partscan", "ram:1M", "--name", "e"]);
}

#[test]
fn files_that_cannot_be_configurations_are_refused() {
    let place = Place::new("config-none", "");
    let why = |path: &Path| ConfigFile::read(path).unwrap_err()[0].text.clone();
    assert!(why(&place.dir).contains("not a regular file"));
    assert!(why(&place.dir.join("other.toml")).contains("No such file"));
    fs::write(place.path(), vec![b'#'; BYTES_MAX as usize + 1]).unwrap();
    assert!(why(&place.path()).contains("larger than 64 KiB"));
    fs::write(place.path(), b"# \xff\n").unwrap();
    assert!(why(&place.path()).contains("UTF-8"));
    let pipe = place.dir.join("pipe.toml");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    assert!(why(&pipe).contains("not a regular file"));
}
