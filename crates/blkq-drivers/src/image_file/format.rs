//! Recognises image formats other than raw, so that such an image is not served as raw data by mistake.

use std::fs::File;
use std::os::unix::fs::FileExt;

use blkq::IoBuffer;

/// Bytes of one read: the largest alignment of direct I/O, and more than any magic needs.
const BLOCK_BYTES: usize = 4096;
/// Size of the footer of a VHD image, in bytes. A fixed VHD image has no header.
const FOOTER_BYTES: u64 = 512;

pub(super) fn detect(file: &File, size: u64) -> Option<&'static str> {
    let mut block = IoBuffer::zeroed(BLOCK_BYTES);
    // `offset` must be a multiple of the block. An error counts as the end of the file: the device reports the error when a
    // client reads there.
    let mut read =
        |offset| file.read_at(&mut block, offset).map_or(Vec::new(), |length| block[..length].to_vec());
    if let Some(format) = by_head(&read(0)) {
        return Some(format);
    }
    // A fixed VHD image consists of the raw data and a footer.
    let footer = size.checked_sub(FOOTER_BYTES)?;
    let within = (footer % BLOCK_BYTES as u64) as usize;
    read(footer - within as u64).get(within..)?.starts_with(b"conectix").then_some("VHD")
}

/// The format whose magic is at the beginning. The magics are those of QEMU's block drivers and of cryptsetup.
fn by_head(head: &[u8]) -> Option<&'static str> {
    const MAGICS: [(usize, &[u8], &str); 11] = [
        (0, b"QFI\xfb", "qcow2"),
        (0, b"QED\0", "QED"),
        (0, b"KDMV", "VMDK"),
        (0, b"COWD", "VMDK"),
        (0, b"# Disk DescriptorFile", "VMDK"),
        (0, b"vhdxfile", "VHDX"),
        (0, b"conectix", "VHD"),
        (64, b"\x7f\x10\xda\xbe", "VDI"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (0, b"WithoutFreeSpace", "Parallels"),
        (0, b"WithouFreSpacExt", "Parallels"),
    ];
    let has = |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|bytes| bytes.starts_with(magic));
    MAGICS.iter().find(|(offset, magic, _)| has(*offset, magic)).map(|(.., format)| *format)
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Option<&'static str> {
        let file =
            rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).map(File::from).unwrap();
        file.write_all_at(bytes, 0).unwrap();
        detect(&file, bytes.len() as u64)
    }

    #[test]
    fn each_format_is_recognised_by_its_magic() {
        let image = |offset: usize, magic: &[u8], size: usize| {
            let mut bytes = vec![0; size];
            bytes[offset..offset + magic.len()].copy_from_slice(magic);
            bytes
        };
        for (offset, magic, format) in [
            (0, &b"QFI\xfb\0\0\0\x03"[..], "qcow2"),
            (0, b"KDMV\x01", "VMDK"),
            (0, b"COWD", "VMDK"),
            (0, b"# Disk DescriptorFile\nversion=1\n", "VMDK"),
            (0, b"vhdxfile", "VHDX"),
            (0, b"conectix", "VHD"),
            (64, b"\x7f\x10\xda\xbe", "VDI"),
            (0, b"LUKS\xba\xbe\0\x02", "LUKS"),
            (0, b"QED\0", "QED"),
            (0, b"WithoutFreeSpace", "Parallels"),
        ] {
            for size in [1 << 20, 4096, 512] {
                assert_eq!(of(&image(offset, magic, size)), Some(format), "{size}");
            }
        }
        // The footer of a fixed VHD may be anywhere in the last block that is read.
        for size in [512, 1024, 4096, 4096 + 512, (1 << 20) + 512] {
            assert_eq!(of(&image(size - 512, b"conectix", size)), Some("VHD"), "{size}");
        }
    }

    #[test]
    fn raw_short_and_empty_files_have_no_format() {
        for bytes in [&b""[..], b"QF", b"QFI", b"conecti", &[0; 511], &[0; 512], &[0xff; 70], &[0; 8192]] {
            assert_eq!(of(bytes), None);
        }
        // A magic at another offset does not count.
        assert_eq!(of(&[&[0][..], b"QFI\xfb", &[0; 600]].concat()), None);
        assert_eq!(of(&[&[0; 1024][..], b"conectix", &[0; 600]].concat()), None);
    }

    #[test]
    fn an_unreadable_file_has_no_format() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert_eq!(detect(&File::from(std::os::fd::OwnedFd::from(reader)), 1 << 20), None);
    }
}
