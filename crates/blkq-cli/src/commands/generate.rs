//! `blkq generate`: writes manual pages and shell completions.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use blkq::output;
use blkq_protocol::failure::{Failure, Outcome};
use clap::{Arg, Command, ValueEnum};
use clap_complete::env::Shells;
use clap_complete::{Generator, Shell};
use clap_mangen::Man;

/// The environment variable that scripts for completion set to the name of their shell.
pub const COMPLETION_VARIABLE: &str = "COMPLETE";

/// Headings of sections in the help of a command, after the options. Each becomes a section of the manual
/// page.
const HEADINGS: &[&str] = &[
    "Keys:",
    "Events:",
    "Columns:",
    EXAMPLES,
    "Environment:",
    "Files:",
    "Files in the state directory:",
    "Exit status:",
];

const EXAMPLES: &str = "Examples:";

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

pub fn run(args: Args, command: Command) -> Outcome {
    let written = match args.kind {
        Kind::Man => manual(command, &args.dir),
        Kind::Completions => completions(&args.dir),
    };
    written.map_err(|e| Failure::new(format!("generate: {e}")))
}

fn completions(dir: &Path) -> io::Result<()> {
    Shells::builtins().iter().try_for_each(|shell| {
        let file = shell.name().parse::<Shell>().map_err(io::Error::other)?.file_name("blkq");
        let mut script = Vec::new();
        shell.write_registration(COMPLETION_VARIABLE, "blkq", "blkq", "blkq", &mut script)?;
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
    let common = sections(&command);
    all.iter().try_for_each(|sub| write_page(dir, sub, &common[1..], &["blkq".to_owned()]))?;
    write_page(dir, &command, &[], &pages)
}

fn page_name(command: &Command) -> String {
    command.get_display_name().unwrap_or(command.get_name()).to_owned()
}

/// A part of the help of a command, after the options: a heading, and the lines below it.
type Section = (&'static str, Vec<String>);

/// The first section has no heading. It contains the lines that belong to no other section.
fn sections(command: &Command) -> Vec<Section> {
    let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let mut sections: Vec<Section> = vec![("", Vec::new())];
    let mut current = 0;
    for line in text.lines() {
        if let Some(heading) = HEADINGS.iter().find(|heading| **heading == line) {
            current = sections.len();
            sections.push((heading, Vec::new()));
            continue;
        }
        if !line.is_empty() && !line.starts_with(' ') {
            current = 0;
        }
        if !line.starts_with("See also:") {
            sections[current].1.push(line.to_owned());
        }
    }
    sections
}

/// Copies examples unchanged. Other lines are terms, each with its description.
fn rendered((heading, lines): &Section) -> String {
    if *heading == EXAMPLES {
        let lines: String = lines.iter().map(|line| roff(line) + "\n").collect();
        return format!(".SH EXAMPLES\n.nf\n{}\n.fi\n", lines.trim_end());
    }
    // A line without a term continues the description before it.
    let terms =
        lines.iter().filter(|line| !line.is_empty()).map(|line| match line.trim_start().split_once("  ") {
            Some((term, what)) => format!(".TP\n{}\n{}\n", roff(term), roff(what.trim_start())),
            None => format!("{}\n", roff(line.trim_start())),
        });
    format!(".SH {}\n{}", heading.trim_end_matches(':').to_uppercase(), terms.collect::<String>())
}

/// `common` are the sections of the main command. Except its examples, every page repeats them, unless the help of the
/// command has a section with the same heading.
fn write_page(dir: &Path, command: &Command, common: &[Section], see_also: &[String]) -> io::Result<()> {
    let own = sections(command);
    // The option `-h` of `attach` has a heading of its own, "Options", which would become a second section
    // OPTIONS.
    let man = Man::new(command.clone().mut_args(|arg| match arg.get_id() == "help" {
        true => arg.help_heading(None),
        false => arg,
    }));
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    write!(page, ".SH SYNOPSIS\n{}.SH DESCRIPTION\n{}.\n.PP\n", synopsis(command), roff(&about))?;
    own[0].1.iter().try_for_each(|line| writeln!(page, "{}", roff(line)))?;
    page.extend(options(&man)?.bytes());
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let is_own = |section: &Section| own.iter().any(|own| own.0 == section.0);
    let inherited = common.iter().filter(|section| section.0 != EXAMPLES && !is_own(section));
    page.extend(own[1..].iter().chain(inherited).flat_map(|section| rendered(section).into_bytes()));
    let see_also: Vec<String> = see_also.iter().map(|page| format!(".BR {} (1)", roff(page))).collect();
    writeln!(page, ".SH SEE ALSO\n{}", see_also.join(",\n"))?;
    write(&dir.join(format!("{}.1", page_name(command))), &page)
}

/// The section OPTIONS. The headings of `--help` become its subsections.
fn options(man: &Man) -> io::Result<String> {
    let mut section = Vec::new();
    man.render_options_section(&mut section)?;
    let section = String::from_utf8_lossy(&section).into_owned();
    let lines = section.lines().map(|line| match line.strip_prefix(".SH ") {
        Some(heading) if heading != "OPTIONS" => {
            format!(".SS {}{}\n", &heading[..1], heading[1..].to_lowercase())
        }
        _ => format!("{line}\n"),
    });
    Ok(lines.collect())
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
    let command_word = if command.has_subcommands() { "\nCOMMAND ..." } else { "" };
    format!(".B {}\n{}{command_word}\n", roff(name), words.collect::<Vec<_>>().join("\n"))
}

fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}
