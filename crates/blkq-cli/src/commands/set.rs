//! `blkq set`: changes settings of a device in use.

use crate::completion;
use crate::control::{Request, ask};
use crate::devices::{device_parser, named};
use crate::failure::Outcome;
use crate::state::StateDir;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
No request in flight is lost. New I/O waits while the image, its mode or the queues change.
`blkq show DEVICE` lists the settings. Each corresponds to the option of `blkq attach` with its
name; merge=off, for example, corresponds to --no-merge.

Examples:
  blkq set disk.img direct-io=on
  blkq set disk.img scheduler=mq-deadline depth=64
  blkq set disk.img read-only=on
  blkq set disk.img on-error=hold-enospc
  blkq set disk.img limit=read-iops=500,bps=100M
  blkq set disk.img hang-warning=5      # seconds; 0 turns it off
  blkq set disk.img receive-backoff=off
  blkq set disk.img fault=none          # for a device attached with --fault")]
pub struct Args {
    /// The device, by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = completion::devices(), value_name = "DEVICE")]
    name: String,
    /// The settings to change, in this order, up to the first that fails
    #[arg(required = true, value_name = "KEY=VALUE", add = completion::settings(), value_parser = parse_setting)]
    settings: Vec<(String, String)>,
}

/// Parses `KEY=VALUE`. Neither part may be empty.
pub fn parse_setting(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("a setting must be KEY=VALUE, such as depth=64".to_owned()),
    }
}

impl Args {
    /// Makes the changes, in order. The first one that is refused ends the command; the changes before it
    /// stay.
    pub fn run(self) -> Outcome {
        let dir = StateDir::locate()?;
        let request = Request::Set { settings: self.settings };
        let name = named(&dir, &self.name)?;
        ask::<()>(&dir, &name, &request).map_err(|e| e.during(format_args!("set {}", self.name)))
    }
}
