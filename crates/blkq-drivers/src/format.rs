/// How to interpret the bytes of an image file.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ImageFormat {
    /// As raw data, unless the image has the magic of another format, which is an error.
    #[default]
    Checked,
    /// As raw data, even if the image has the magic of another format.
    Raw,
    /// As a qcow2 image, QEMU's format.
    Qcow2,
}
