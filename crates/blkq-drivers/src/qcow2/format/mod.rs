//! The structures of the format: the header with its extensions, and the entries of tables. They are parsed and
//! built in memory. Names no other module of the driver, and no file.

pub(super) mod entry;
pub(super) mod header;
