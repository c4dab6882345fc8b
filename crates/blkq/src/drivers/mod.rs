//! The drivers that need no image: [`null`], the shortest one, and [`ram`].

pub mod null;
pub mod ram;
