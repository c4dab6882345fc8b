//! Replaces `admissions.rs` outside of a simulated world, where nothing checks which requests are admitted.

use crate::request::Request;
use crate::tags::Tag;

#[inline(always)]
pub(crate) fn admitted(_batch: &[Tag], _requests: &[Request]) {}
