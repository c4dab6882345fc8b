//! Outside of a simulated world nobody checks the requests that limits let through: the verb of
//! `admissions.rs`, empty.

use crate::request::Request;
use crate::tags::Tag;

#[inline(always)]
pub(crate) fn admitted(_batch: &[Tag], _requests: &[Request]) {}
