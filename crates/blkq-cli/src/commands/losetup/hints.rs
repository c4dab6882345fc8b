//! Translates hints of other commands into options that a user of `blkq losetup` can type.

use clap::{Args, Command};

use crate::commands::{attach, detach};

const RENAMED: [(&str, &str); 2] = [("size-limit", "--sizelimit"), ("name", "--loop-ref")];

/// Replaces each option in `text` that losetup, whose arguments are `L`, lacks: by its name in losetup, or by
/// `blkq attach OPTION` or `blkq detach OPTION`. Text in backquotes is a complete command and is copied unchanged.
pub(super) fn translated<L: Args>(text: &str) -> String {
    let quoted = text.split('`').enumerate();
    let parts = quoted.map(|(at, part)| if at % 2 == 0 { options::<L>(part) } else { part.to_owned() });
    parts.collect::<Vec<_>>().join("`")
}

fn options<L: Args>(text: &str) -> String {
    let mut translated = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("--") {
        let (before, option) = rest.split_at(at);
        let end = option[2..].find(|c: char| !c.is_ascii_lowercase() && c != '-');
        let (option, after) = option.split_at(end.map_or(option.len(), |end| end + 2));
        translated.push_str(before);
        push::<L>(&mut translated, option);
        rest = after;
    }
    translated + rest
}

/// Appends `option` to `text`, translated. If `text` ends with `attach with ` or `detach with `, `blkq ` is
/// inserted before it instead.
fn push<L: Args>(text: &mut String, option: &str) {
    let name = &option[2..];
    if let Some((_, renamed)) = RENAMED.iter().find(|(renamed, _)| *renamed == name) {
        text.push_str(renamed);
        return;
    }
    let commands = [("attach", has::<attach::Args>(name)), ("detach", has::<detach::Args>(name))];
    if let Some((command, _)) = commands.into_iter().find(|(_, is_option)| *is_option && !has::<L>(name)) {
        match text.strip_suffix(&format!("{command} with ")).map(str::len) {
            Some(before) => text.insert_str(before, "blkq "),
            None => text.push_str(&format!("blkq {command} ")),
        }
    }
    text.push_str(option);
}

fn has<A: Args>(option: &str) -> bool {
    A::augment_args(Command::new("blkq")).get_arguments().any(|argument| argument.get_long() == Some(option))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::commands::{Cli, losetup};

    #[test]
    fn every_option_of_a_hint_can_be_typed() {
        let blkq = Cli::command();
        let hint = translated::<losetup::Args>;
        assert_eq!(hint("use --export nbd"), "use blkq attach --export nbd");
        assert_eq!(hint("use --offset and --size-limit"), "use --offset and --sizelimit");
        assert_eq!(hint("or use --force"), "or use blkq detach --force");
        assert_eq!(
            hint("no; attach with --shared on both sides"),
            "no; blkq attach with --shared on both sides"
        );
        assert_eq!(
            hint("`blkq attach x --create SIZE`; --shared"),
            "`blkq attach x --create SIZE`; blkq attach --shared"
        );
        assert_eq!(hint("omit --read-only, --partscan"), "omit --read-only, --partscan");
        assert_eq!(hint("a -- b"), "a -- b");
        let losetup = blkq.find_subcommand("losetup").unwrap();
        for option in
            blkq.find_subcommand("attach").unwrap().get_arguments().filter_map(|option| option.get_long())
        {
            let text = hint(&format!("--{option}"));
            let is_own = losetup.get_arguments().any(|own| own.get_long() == text.strip_prefix("--"));
            assert!(is_own || text == format!("blkq attach --{option}"), "{text}");
        }
    }
}
