//! Parses the addresses of a device that `attach` and `show` print.

use std::path::PathBuf;

use crate::launch::systemd::unescape;

/// An address to which clients connect.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    Nbd {
        address: NbdAddress,
        tls: bool,
        /// The name of the export; empty for the default export.
        export: String,
    },
    /// The socket for the front end of a virtual machine.
    VhostUser(PathBuf),
}

/// The address of an NBD server: a unix socket, or host and port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NbdAddress {
    Unix(PathBuf),
    Tcp(String, String),
}

impl Place {
    /// Parses an export of a device. Returns `None` for a block device and for sockets that another program passed.
    pub fn parse(export: &str) -> Option<Place> {
        if let Some(path) = export.strip_prefix("vhost-user:") {
            return Some(Place::VhostUser(path.into()));
        }
        let (scheme, rest) = export.split_once("://")?;
        let text = |escaped: &str| unescape(escaped, "%").into_string().ok();
        if let Some(unix) = scheme.strip_suffix("+unix") {
            let (export, path) = rest.strip_prefix('/')?.split_once("?socket=")?;
            let address = NbdAddress::Unix(unescape(path, "%").into());
            return Some(Place::Nbd { address, tls: is_tls(unix)?, export: text(export)? });
        }
        let (address, export) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = address.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address = NbdAddress::Tcp(host.to_owned(), port.to_owned());
        Some(Place::Nbd { address, tls: is_tls(scheme)?, export: text(export)? })
    }
}

fn is_tls(scheme: &str) -> Option<bool> {
    match scheme {
        "nbd" => Some(false),
        "nbds" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_of_devices_are_places() {
        let unix = |path: &str| NbdAddress::Unix(path.into());
        let tcp = |host: &str| NbdAddress::Tcp(host.to_owned(), "10809".to_owned());
        let nbd = |address, tls, export: &str| Some(Place::Nbd { address, tls, export: export.to_owned() });
        for (export, place) in [
            ("nbd+unix:///?socket=/run/blkq/a%20b.nbd", nbd(unix("/run/blkq/a b.nbd"), false, "")),
            ("nbds+unix:///d%25?socket=/run/d.nbd", nbd(unix("/run/d.nbd"), true, "d%")),
            ("nbd://127.0.0.1:10809", nbd(tcp("127.0.0.1"), false, "")),
            ("nbds://[::1]:10809/disk", nbd(tcp("::1"), true, "disk")),
            ("vhost-user:/run/d.vhost", Some(Place::VhostUser("/run/d.vhost".into()))),
            ("/dev/ublkb0", None),
            ("nbd on an inherited socket", None),
            ("http://a:1/", None),
        ] {
            assert_eq!(Place::parse(export), place, "{export}");
        }
    }
}
