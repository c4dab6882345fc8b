//! `blkq group`: groups of devices that share rate limits.

use std::time::Duration;

use blkq::throttle::RateLimits;
use blkq_protocol::control::statistics::Statistics;
use blkq_protocol::control::{Request, call};
use blkq_protocol::failure::Outcome;
use blkq_protocol::group::{GroupFile, names};
use blkq_protocol::options::{parse_group_name, parse_new_group_name};
use blkq_protocol::state::StateDir;
use clap::Subcommand;
use serde::Serialize;

use crate::commands::stat::rates;
use crate::output::{Align, print, print_json, render};

const INTERVAL: Duration = Duration::from_millis(500);

#[derive(Subcommand, Debug)]
#[command(after_help = "\
The members of a group share its limits. If they demand more than the limits allow, each gets a
share in proportion to its weight, and can use what the others leave unused. Devices join a group
when they are attached (docs/limits.md).

Examples:
  blkq group set tenant-a iops=2000,bps=200M
  blkq attach disk.img --group tenant-a --weight 200
  blkq group list
  blkq group set tenant-a none")]
pub enum Command {
    /// List the groups, with their limits, their members and the I/O rates of the members
    List {
        /// Print one JSON array of objects
        #[arg(long)]
        json: bool,
    },
    /// Set the limits of a group, which may be in use; create it if it does not exist
    Set {
        /// The name of the group
        #[arg(value_parser = parse_new_group_name)]
        name: String,
        /// The limits, KEY=RATE,... as for `blkq attach --limit`; none removes all limits
        #[arg(value_parser = str::parse::<RateLimits>)]
        limits: RateLimits,
    },
    /// Remove a group without members
    Remove {
        /// The name of the group
        #[arg(value_parser = parse_group_name)]
        name: String,
    },
}

#[derive(Serialize)]
struct ListedGroup {
    name: String,
    /// Null if the file of the group is damaged; then `error` says why.
    limits: Option<String>,
    members: Vec<ListedMember>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// The rates are null if the daemon of the member does not answer.
#[derive(Default, Serialize)]
struct ListedMember {
    name: String,
    weight: u32,
    iops: Option<f64>,
    mb_per_s: Option<f64>,
    /// Requests that wait for a limit now.
    throttled: Option<u64>,
}

pub fn run(command: Command) -> Outcome {
    let dir = StateDir::locate()?;
    match command {
        Command::List { json } => {
            let groups = list(&dir)?;
            if json { print_json(&groups) } else { print(&table(&groups)) }
        }
        Command::Set { name, limits } => GroupFile::set(&dir, &name, &limits),
        Command::Remove { name } => GroupFile::remove(&dir, &name),
    }
}

/// Takes [`INTERVAL`] if a group has members, because their rates are measured.
fn list(dir: &StateDir) -> Outcome<Vec<ListedGroup>> {
    let counters = |name: &str| call::<Statistics>(dir, name, &Request::Stat {}).ok().flatten();
    let mut groups = Vec::new();
    let mut before = Vec::new();
    for name in names(dir)? {
        let mut listed = ListedGroup { name, limits: None, members: Vec::new(), error: None };
        match GroupFile::open(dir, &listed.name) {
            Ok((file, limits)) => {
                listed.limits = Some(limits.to_string());
                for member in file.members() {
                    before.push(counters(&member.name));
                    let (name, weight) = (member.name, member.weight);
                    listed.members.push(ListedMember { name, weight, ..ListedMember::default() });
                }
            }
            Err(failure) => listed.error = Some(failure.to_string()),
        }
        groups.push(listed);
    }
    if before.iter().any(Option::is_some) {
        std::thread::sleep(INTERVAL);
    }
    for (member, before) in groups.iter_mut().flat_map(|group| &mut group.members).zip(before) {
        let Some((before, now)) = before.zip(counters(&member.name)) else { continue };
        let (iops, mb_per_s) = rates(&before, &now);
        member.iops = Some(iops);
        member.mb_per_s = Some(mb_per_s);
        member.throttled = Some(now.snapshot().throttled);
    }
    Ok(groups)
}

fn table(groups: &[ListedGroup]) -> String {
    let heads = ["GROUP", "LIMITS", "MEMBER", "WEIGHT", "IOPS", "MB/s", "THROTTLED"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    let number = |number: Option<f64>| number.map_or("-".to_owned(), |number| format!("{number:.1}"));
    for group in groups {
        let limits = group.limits.as_ref().or(group.error.as_ref()).cloned().unwrap_or_default();
        // Only the first row of a group names it.
        let mut first = [group.name.clone(), limits];
        let members = group.members.iter().map(|member| {
            let throttled = member.throttled.map_or("-".to_owned(), |throttled| throttled.to_string());
            let [iops, mb_per_s] = [member.iops, member.mb_per_s].map(number);
            [member.name.clone(), member.weight.to_string(), iops, mb_per_s, throttled]
        });
        let none = group.members.is_empty().then(|| ["-", "", "", "", ""].map(str::to_owned));
        rows.extend(members.chain(none).map(|cells| [&std::mem::take(&mut first)[..], &cells].concat()));
    }
    use Align::{Left, Right};
    render([Left, Left, Left, Right, Right, Right, Right], &rows)
}
