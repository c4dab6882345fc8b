//! The drivers without an image: [`null`], which is also the template for new drivers, and [`ram`].

pub mod null;
pub mod ram;
