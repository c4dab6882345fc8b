//! The formats of images.

/// The meaning of the bytes of an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ImageFormat {
    /// Those of the device, unless the image has the magic of another format, which is an error.
    #[default]
    Checked,
    /// Those of the device, whatever magic the image has.
    Raw,
    /// A qcow2 image.
    Qcow2,
}
