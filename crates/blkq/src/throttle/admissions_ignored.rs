//! Replaces `admissions.rs` in builds without simulation, which do not check which requests are admitted.

use crate::request::Request;
use crate::tags::Tag;

#[inline(always)]
pub(crate) fn admitted(_batch: &[Tag], _requests: &[Request]) {}
