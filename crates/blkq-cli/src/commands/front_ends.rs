//! `blkq show --qemu` and `--libvirt`: prints how virtual machines connect to a device.

use std::path::Path;

use blkq::text::shell_word;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::DeviceInfo;

use crate::devices::{NbdAddress, Place};

/// The directory of the certificates for NBD clients in QEMU's documentation and in libvirt.
const CLIENT_CERTIFICATES: &str = "/etc/pki/qemu";
/// Maximum length of a node name in QEMU.
const NODE_CHARS_MAX: usize = 31;

/// The export that a virtual machine uses, vhost-user-blk if there is one. Two exports would become two disks with the
/// same data.
fn place(info: &DeviceInfo) -> Outcome<Place> {
    let mut places: Vec<Place> = info.exports.iter().filter_map(|export| Place::parse(export)).collect();
    if places.is_empty() {
        let name = &info.name;
        return Err(Failure::new(format!(
            "{name}: virtual machines cannot connect to this device; attach it with --export vhost-user-blk or --export nbd"
        )));
    }
    let vhost = places.iter().position(|place| matches!(place, Place::VhostUser(_)));
    Ok(places.swap_remove(vhost.unwrap_or(0)))
}

/// The ID of QEMU's objects for the device: letters, digits and `-`, beginning with a letter. If the name
/// must be changed for that, a hash of it keeps the IDs of different devices apart.
fn id_of(name: &str) -> String {
    const PREFIX: &str = "blkq-";
    let room = NODE_CHARS_MAX - PREFIX.len();
    let plain: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    if plain == name && plain.len() <= room {
        return format!("{PREFIX}{plain}");
    }
    let hash = format!("-{:08x}", fnv1a(name));
    let kept: String = plain.chars().take(room - hash.len()).collect();
    format!("{PREFIX}{kept}{hash}")
}

fn fnv1a(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

fn queues(info: &DeviceInfo) -> &str {
    let queues = info.settings.iter().find(|(key, _)| key == "queues");
    queues.map_or("1", |(_, queues)| queues.as_str())
}

/// Commas in the value of a QEMU option are doubled.
fn value(text: impl AsRef<Path>) -> String {
    text.as_ref().to_string_lossy().replace(',', ",,")
}

/// Options for a disk of the device, one per line of a shell command.
pub fn qemu(info: &DeviceInfo) -> Outcome<String> {
    let id = id_of(&info.name);
    let mut options: Vec<(&str, String)> = Vec::new();
    match place(info)? {
        Place::VhostUser(path) => {
            let path = value(path);
            options.push(("-chardev", format!("socket,id={id},path={path},reconnect-ms=1000")));
            let queues = queues(info);
            options.push(("-device", format!("vhost-user-blk-pci,chardev={id},num-queues={queues}")));
        }
        Place::Nbd { address, tls, export } => {
            let server = match address {
                NbdAddress::Unix(path) => format!("type=unix,server.path={}", value(path)),
                NbdAddress::Tcp(host, port) => format!("type=inet,server.host={host},server.port={port}"),
            };
            let mut node = format!("driver=nbd,node-name={id},server.{server}");
            if !export.is_empty() {
                node.push_str(&format!(",export={}", value(export)));
            }
            if tls {
                let dir = CLIENT_CERTIFICATES;
                options.push(("-object", format!("tls-creds-x509,id={id}-tls,endpoint=client,dir={dir}")));
                node.push_str(&format!(",tls-creds={id}-tls"));
            }
            let access = if info.read_only { "read-only=on" } else { "discard=unmap" };
            options.push(("-blockdev", format!("{node},{access}")));
            options.push(("-device", format!("virtio-blk-pci,drive={id}")));
        }
    }
    let lines = options.iter().map(|(option, value)| format!("{option} {}", shell_word(value)));
    Ok(lines.collect::<Vec<_>>().join(" \\\n") + "\n")
}

pub fn memory_hint(info: &DeviceInfo) -> Option<String> {
    info.exports.iter().any(|export| export.starts_with("vhost-user:")).then(|| {
        let name = &info.name;
        format!(
            "{name}: QEMU must share the memory of the guest; add -machine memory-backend=mem -object memory-backend-memfd,id=mem,share=on,size=SIZE, with the SIZE of -m"
        )
    })
}

pub fn libvirt(info: &DeviceInfo) -> Outcome<String> {
    let element = match place(info)? {
        Place::VhostUser(path) => format!(
            "<!-- The domain also needs: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking> -->\n\
             <disk type='vhostuser' device='disk'>\n  \
             <driver name='qemu' type='raw' queues='{}'/>\n  \
             <source type='unix' path='{}'><reconnect enabled='yes' timeout='1'/></source>\n",
            queues(info),
            attribute(path),
        ),
        Place::Nbd { address, tls, export } => {
            let mut source = String::new();
            if !export.is_empty() {
                source += &format!(" name='{}'", attribute(export));
            }
            if tls {
                source += " tls='yes'";
            }
            let host = match address {
                NbdAddress::Unix(path) => format!("transport='unix' socket='{}'", attribute(path)),
                NbdAddress::Tcp(host, port) => format!("name='{}' port='{port}'", attribute(host)),
            };
            let (discard, read_only) =
                if info.read_only { ("", "  <readonly/>\n") } else { (" discard='unmap'", "") };
            format!(
                "<disk type='network' device='disk'>\n  \
                 <driver name='qemu' type='raw'{discard}/>\n  \
                 <source protocol='nbd'{source}>\n    \
                 <host {host}/>\n  \
                 </source>\n{read_only}"
            )
        }
    };
    Ok(format!("{element}  <target dev='vda' bus='virtio'/>\n</disk>\n"))
}

fn attribute(text: impl AsRef<Path>) -> String {
    let special =
        [("&", "amp"), ("<", "lt"), (">", "gt"), ("'", "apos"), ("\t", "#9"), ("\n", "#10"), ("\r", "#13")];
    let text = text.as_ref().to_string_lossy().into_owned();
    special.iter().fold(text, |text, (character, name)| text.replace(character, &format!("&{name};")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_devices_have_different_ids() {
        let names = [
            "vm1",
            "disk.img",
            "disk-img",
            "disk_img",
            "a-name-of-26-characters-ab",
            "a-name-of-26-characters-abc",
        ];
        let ids = names.map(id_of);
        assert_eq!((ids[0].as_str(), ids[2].as_str()), ("blkq-vm1", "blkq-disk-img"));
        assert_eq!((ids[4].as_str(), fnv1a("a")), ("blkq-a-name-of-26-characters-ab", 0xe40c_292c));
        for (at, id) in ids.iter().enumerate() {
            assert!(id.len() <= NODE_CHARS_MAX && !ids[..at].contains(id), "{id}");
            assert!(id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'), "{id}");
        }
    }
}
