//! The persistent dirty bitmaps in the image: their directory and the header extension, the clusters of their bits, and
//! when both are written. Names `io` and the modules below it.

pub(super) mod format;
pub(super) mod places;
