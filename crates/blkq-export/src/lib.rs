//! Attachments: what serves a blkq disk to others.

pub mod nbd;
