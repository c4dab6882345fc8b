//! `blkq generate`: manual pages and shell completions, made from the command line's
//! own definition.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Arg, Command, ValueEnum};
use clap_complete::env::Shells;
use clap_mangen::Man;

use crate::completion::VARIABLE;
use crate::failure::{Failure, Outcome};

/// The heading of the examples in a command's help.
const EXAMPLES: &str = "Examples:\n";
/// Sections that all pages have.
const SECTIONS: &str = r".SH ENVIRONMENT
.TP
BLKQ_STATE_DIR
The state directory.
.TP
BLKQ_CONFIG_DIR
The directory of configuration files.
.TP
XDG_RUNTIME_DIR
The state directory of other users than root is
.I blkq
in there.
.SH FILES
.TP
.I /etc/blkq/NAME.toml
The options of a device, for
.B blkq attach \-\-config
and the service blkq@NAME.
.TP
.I /run/blkq
The state directory of root.
.B blkq show
names it, and the log, for each device. It has NAME.log (the log of the daemon), NAME.log.1 (the one before), NAME.json
(what is kept for
.BR blkq\-recover (1)),
NAME.nbd, NAME.vhost and NAME.control (sockets) and NAME.lock.
.SH EXIT STATUS
.TP
0
Done.
.TP
1
Refused or failed; one line on standard error has what, why, and the cure.
.TP
2
Wrong usage.
";

/// Options of `generate`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  blkq generate man /usr/local/share/man/man1
  blkq generate completions .
      blkq.bash _blkq blkq.fish blkq.elv _blkq.ps1")]
pub struct Args {
    /// The kind of files to write
    kind: Kind,
    /// An existing directory to write into
    dir: PathBuf,
}

/// The kinds of files that can be generated.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// blkq.1 and one page per subcommand
    Man,
    /// For bash, elvish, fish, powershell and zsh; they run blkq for the names of devices
    Completions,
}

impl Args {
    /// Writes the files.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn run(self, command: Command) -> Outcome {
        let written = match self.kind {
            Kind::Man => manual(command, &self.dir),
            Kind::Completions => completions(&self.dir),
        };
        written.map_err(|e| Failure::new(format!("generate into {}: {e}", self.dir.display())))
    }
}

fn completions(dir: &Path) -> io::Result<()> {
    Shells::builtins().iter().try_for_each(|shell| {
        let file = match shell.name() {
            "bash" => "blkq.bash",
            "zsh" => "_blkq",
            "fish" => "blkq.fish",
            "elvish" => "blkq.elv",
            _ => "_blkq.ps1",
        };
        let mut script = Vec::new();
        shell.write_registration(VARIABLE, "blkq", "blkq", "blkq", &mut script)?;
        if shell.name() == "zsh" {
            // Loaded from $fpath, the file is the function, and completes the first time too.
            script.extend(b"[[ $funcstack[1] != _blkq ]] || _clap_dynamic_completer_blkq\n");
        }
        fs::write(dir.join(file), script)
    })
}

fn manual(command: Command, dir: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let all: Vec<Command> = command.get_subcommands().filter(|sub| !sub.is_hide_set()).cloned().collect();
    let pages: Vec<String> = all.iter().map(page_name).collect();
    for sub in &all {
        write_page(dir, sub, &["blkq".to_owned()])?;
    }
    write_page(dir, &command, &pages)
}

fn page_name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

fn write_page(dir: &Path, command: &Command, see_also: &[String]) -> io::Result<()> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (text, after) = help.split_once(EXAMPLES).unwrap_or((&help, ""));
    // The text after the examples is in sections of its own.
    let examples = after.split("\n\n").next().unwrap_or_default();
    let man = Man::new(command.clone());
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    page.extend(format!(".SH SYNOPSIS\n{}", synopsis(command)).bytes());
    man.render_description_section(&mut page)?;
    page.extend(text.lines().map(|line| roff(line) + "\n").collect::<String>().bytes());
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    if !examples.is_empty() {
        let lines: String = examples.lines().map(|line| roff(line) + "\n").collect();
        page.extend(format!(".SH EXAMPLES\n.nf\n{lines}.fi\n").bytes());
    }
    page.extend(SECTIONS.bytes());
    let see_also: Vec<String> = see_also.iter().map(|page| format!(".BR {} (1)", roff(page))).collect();
    page.extend(format!(".SH SEE ALSO\n{}\n", see_also.join(",\n")).bytes());
    fs::write(dir.join(format!("{}.1", page_name(command))), page)
}

/// The command with its options and their values.
fn synopsis(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let (positional, options): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(|arg| !arg.is_hide_set()).partition(|arg| arg.is_positional());
    let words = options.into_iter().chain(positional).map(|arg| {
        let text = roff(&arg.to_string());
        // Positional ones have brackets of their own.
        if arg.is_required_set() || arg.is_positional() { text } else { format!("[{text}]") }
    });
    let words: Vec<String> = words.collect();
    let command_word = if command.has_subcommands() { "\nCOMMAND ..." } else { "" };
    format!(".B {}\n{}{command_word}\n", roff(name), words.join("\n"))
}

/// `text` as a line of roff(7).
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}
