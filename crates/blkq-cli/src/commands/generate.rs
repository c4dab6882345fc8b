//! `blkq generate`: writes manual pages and shell completions.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use blkq::output;
use blkq_protocol::failure::{Failure, Outcome};
use clap::{Arg, Command, ValueEnum};
use clap_complete::env::Shells;
use clap_mangen::Man;

use crate::completion::VARIABLE;

/// Headings of sections in the help of a command, after the options. Each becomes a section of the manual
/// page.
const HEADINGS: &[&str] = &[
    "Keys:",
    "Events:",
    "Columns:",
    "Examples:",
    "Environment:",
    "Files:",
    "Files in the state directory:",
    "Exit status:",
];

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Examples:
  blkq generate man /usr/local/share/man/man1
  blkq generate completions .
      blkq.bash _blkq blkq.fish blkq.elv _blkq.ps1")]
pub struct Args {
    /// The kind of files to write
    kind: Kind,
    /// The directory to write to, which must exist
    dir: PathBuf,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Manual pages: blkq.1, and a page per command
    Man,
    /// Completions for bash, elvish, fish, PowerShell and zsh, which run blkq to complete device names
    Completions,
}

impl Args {
    pub fn run(self, command: Command) -> Outcome {
        let written = match self.kind {
            Kind::Man => manual(command, &self.dir),
            Kind::Completions => completions(&self.dir),
        };
        written.map_err(|e| Failure::new(format!("generate: {e}")))
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
            // zsh autoloads the file from $fpath as the body of the function `_blkq`. Without this line, the
            // first completion would only register the completer.
            script.extend(b"[[ $funcstack[1] != _blkq ]] || _clap_dynamic_completer_blkq\n");
        }
        write(&dir.join(file), &script)
    })
}

/// Replaces an existing file only if it contains the name of the command, as all generated files do.
fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let is_earlier = |head: &[u8]| String::from_utf8_lossy(head).contains("blkq");
    let written = output::create(path, is_earlier).and_then(|mut file| file.write_all(text));
    written.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

fn manual(command: Command, dir: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let all: Vec<Command> = command.get_subcommands().filter(|sub| !sub.is_hide_set()).cloned().collect();
    let pages: Vec<String> = all.iter().map(page_name).collect();
    let common = Help::of(&command).sections;
    all.iter().try_for_each(|sub| write_page(dir, sub, &common, &["blkq".to_owned()]))?;
    write_page(dir, &command, &[], &pages)
}

fn page_name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

/// The part of the help of a command that follows the options.
struct Help {
    /// The lines before the first section.
    text: Vec<String>,
    sections: Vec<Section>,
}

struct Section {
    heading: &'static str,
    lines: Vec<String>,
}

impl Help {
    fn of(command: &Command) -> Help {
        let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let mut help = Help { text: Vec::new(), sections: Vec::new() };
        let mut in_section = false;
        for line in text.lines() {
            if let Some(heading) = HEADINGS.iter().find(|heading| **heading == line) {
                help.sections.push(Section { heading, lines: Vec::new() });
                in_section = true;
                continue;
            }
            in_section &= line.is_empty() || line.starts_with(' ');
            if line.starts_with("See also:") {
                continue;
            }
            match help.sections.last_mut() {
                Some(section) if in_section => section.lines.push(line.to_owned()),
                _ => help.text.push(line.to_owned()),
            }
        }
        help
    }
}

impl Section {
    fn is_examples(&self) -> bool {
        self.heading == "Examples:"
    }

    /// Copies examples unchanged. Other lines are terms, each with its description.
    fn rendered(&self) -> String {
        let lines = self.lines.iter().filter(|line| self.is_examples() || !line.is_empty());
        if self.is_examples() {
            let lines: String = lines.map(|line| roff(line) + "\n").collect();
            return format!(".SH EXAMPLES\n.nf\n{}\n.fi\n", lines.trim_end());
        }
        // A line without a term continues the description before it.
        let terms: String = lines
            .map(|line| match line.trim_start().split_once("  ") {
                Some((term, what)) => format!(".TP\n{}\n{}\n", roff(term), roff(what.trim_start())),
                None => format!("{}\n", roff(line.trim_start())),
            })
            .collect();
        format!(".SH {}\n{terms}", self.heading.trim_end_matches(':').to_uppercase())
    }
}

/// `common` are the sections of the main command. Except its examples, every page repeats them, unless the help of the
/// command has a section with the same heading.
fn write_page(dir: &Path, command: &Command, common: &[Section], see_also: &[String]) -> io::Result<()> {
    let help = Help::of(command);
    // The option `-h` of `attach` has a heading of its own, "Options", which would become a second section
    // OPTIONS.
    let man = Man::new(command.clone().mut_args(|arg| match arg.get_id() == "help" {
        true => arg.help_heading(None),
        false => arg,
    }));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    page.extend(format!(".SH SYNOPSIS\n{}", synopsis(command)).bytes());
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    page.extend(format!(".SH DESCRIPTION\n{}.\n.PP\n", roff(&about)).bytes());
    page.extend(help.text.iter().flat_map(|line| (roff(line) + "\n").into_bytes()));
    page.extend(options(&man)?.bytes());
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let is_own = |section: &Section| help.sections.iter().any(|own| own.heading == section.heading);
    let inherited = common.iter().filter(|section| !section.is_examples() && !is_own(section));
    page.extend(help.sections.iter().chain(inherited).flat_map(|section| section.rendered().into_bytes()));
    let see_also: Vec<String> = see_also.iter().map(|page| format!(".BR {} (1)", roff(page))).collect();
    page.extend(format!(".SH SEE ALSO\n{}\n", see_also.join(",\n")).bytes());
    write(&dir.join(format!("{}.1", page_name(command))), &page)
}

/// The section OPTIONS. The headings of `--help` become its subsections.
fn options(man: &Man) -> io::Result<String> {
    let mut section = Vec::new();
    man.render_options_section(&mut section)?;
    let section = String::from_utf8_lossy(&section).into_owned();
    let lines = section.lines().map(|line| match line.strip_prefix(".SH ") {
        Some(heading) if heading != "OPTIONS" => format!(".SS {}\n", capitalized(heading)),
        _ => format!("{line}\n"),
    });
    Ok(lines.collect())
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().into_iter();
    first.chain(letters.flat_map(char::to_lowercase)).collect()
}

fn synopsis(command: &Command) -> String {
    let name = command.get_bin_name().unwrap_or(command.get_name());
    let (positional, options): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(|arg| !arg.is_hide_set()).partition(|arg| arg.is_positional());
    let words = options.into_iter().chain(positional).map(|arg| {
        let text = roff(&arg.to_string());
        // The text of an optional positional argument already has brackets.
        if arg.is_required_set() || arg.is_positional() { text } else { format!("[{text}]") }
    });
    let words: Vec<String> = words.collect();
    let command_word = if command.has_subcommands() { "\nCOMMAND ..." } else { "" };
    format!(".B {}\n{}{command_word}\n", roff(name), words.join("\n"))
}

fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}
