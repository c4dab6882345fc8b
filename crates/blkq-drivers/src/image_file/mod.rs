//! The file of an image: how it is opened, locked and read, and the facts about it that every driver of image files
//! needs: its alignment, its holes, its current name, and whether I/O on it can bypass the page cache.
//!
//! A driver submits I/O to the descriptor that [`ImageFile::file`] has. Threads that may wait read with
//! [`ImageFile::read_exact_at`] and [`ImageFile::read_padded_at`].

mod claim;
mod file;
pub(crate) mod lock;
mod probe;

pub use file::link_elsewhere;
pub(crate) use file::{ImageFile, ImageName, OPERATIONS, check_not_longer, check_write_access, sync};
pub(crate) use lock::{LockKind, WHOLE_FILE};
pub(crate) use probe::{ClientTerms, DirectAlign, Mode, buffered, choose_mode, name_now};
