//! The functions of `injections.rs` without effect: outside of simulations no model checks the faults.

use blkq::{DriverContext, IoResult, Tag};

use super::spec::{Effect, Rule};

pub fn armed(_rule: &Rule) {}

pub fn hit(_cx: &DriverContext<'_>, _tag: Tag, _effect: Effect, _at: u64) {}

pub fn completed(_cx: &DriverContext<'_>, _tag: Tag, _effect: Option<Effect>, _result: IoResult) {}
