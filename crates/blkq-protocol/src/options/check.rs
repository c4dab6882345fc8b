//! The rules for combinations of options of any origin. Options without an effect together are rejected.

use blkq::throttle::{LimitMode, WEIGHT_MAX};
use blkq_drivers::DriverSpec;
use blkq_drivers::r#loop::{DirectIo, Dispatch};

use super::values::{parse_ceph_user, parse_export_name, parse_group_name};
use super::{
    Address, AttachOptions, Backing, CONNECTIONS, Copying, DEPTH, Export, Format, HANDSHAKE_TIMEOUT_S,
    QUEUES, Tls, image_text,
};
use crate::failure::{Failure, Outcome};

impl AttachOptions {
    /// The error names the first option that is invalid regardless of the image and the kernel, with a hint.
    pub fn check(&self) -> Outcome {
        self.mistakes().into_iter().next().map_or(Ok(()), Err)
    }

    /// All mistakes in the options, regardless of the image and the kernel, with hints.
    pub fn mistakes(&self) -> Vec<Failure> {
        let asked = |export| self.exports.contains(&export);
        let mut mistakes = self.invalid_values();
        if !self.exports.is_empty() {
            mistakes.extend(self.mistakes_of_exports(asked(Export::Nbd), asked(Export::Ublk)));
        }
        if !asked(Export::VhostUserBlk) {
            let of_vhost = [
                (self.vhost_socket.is_some(), "--vhost-socket"),
                (self.register_memory, "--register-memory"),
            ];
            mistakes
                .extend(given(&of_vhost, "is for vhost-user-blk; add --export vhost-user-blk, or omit it"));
        }
        mistakes.extend(self.mistakes_of_image());
        let is_unix = |address: &Address| matches!(address, Address::Unix(_));
        let has_socket = self.vhost_socket.is_some() || self.listen.iter().any(is_unix);
        if (self.socket_mode.is_some() || self.socket_group.is_some()) && !has_socket {
            mistakes.push(Failure::new(
                "--socket-mode and --socket-group apply to the sockets of --listen unix:PATH and --vhost-socket; add one of these options, with a path outside of the state directory, which only its owner can enter",
            ));
        }
        if matches!(self.tls, Some(Tls::On | Tls::Require)) && self.tls_certificates.is_none() {
            let hint = "--tls needs certificates; add --tls-certificates DIR (docs/nbd.md)";
            mistakes.push(Failure::new(hint));
        }
        mistakes
    }

    /// The command line rejects the same numbers and names, but a state file may contain them.
    fn invalid_values(&self) -> Vec<Failure> {
        let numbers = [
            ("--queues", QUEUES, Some(self.queues)),
            ("--threads-per-queue", QUEUES, Some(self.threads_per_queue)),
            ("--queues times --threads-per-queue", QUEUES, self.queues.checked_mul(self.threads_per_queue)),
            ("--depth", DEPTH, Some(self.depth)),
            ("--max-connections", CONNECTIONS, self.max_connections),
            ("--handshake-timeout", HANDSHAKE_TIMEOUT_S, self.handshake_timeout),
        ];
        let mut mistakes = Vec::new();
        for (option, range, number) in numbers {
            if let Some(number) = number.filter(|number| !range.contains(number)) {
                let (least, most) = range.into_inner();
                mistakes.push(Failure::new(format!("{option} must be {least} to {most}, not {number}")));
            }
        }
        if let Some(weight) = self.weight.filter(|weight| !(1..=WEIGHT_MAX).contains(weight)) {
            mistakes.push(Failure::new(format!("--weight must be 1 to {WEIGHT_MAX}, not {weight}")));
        }
        match &self.group {
            Some(_) if self.limit == LimitMode::Auto => {
                mistakes.push(Failure::new(
                    "--limit auto is not possible in a group; omit --group, or set fixed limits",
                ));
            }
            Some(name) => mistakes.extend(parse_group_name(name).err().map(Failure::new)),
            None if self.weight.is_some() => {
                mistakes
                    .push(Failure::new("--weight has no effect without a group; add --group, or omit it"));
            }
            None => {}
        }
        if let Some(name) = &self.export_name {
            mistakes.extend(parse_export_name(name).err().map(Failure::new));
        }
        mistakes
    }

    /// Rejects options that have no effect on the given exports.
    pub fn check_exports(&self, nbd: bool, ublk: bool) -> Outcome {
        self.mistakes_of_exports(nbd, ublk).into_iter().next().map_or(Ok(()), Err)
    }

    fn mistakes_of_exports(&self, nbd: bool, ublk: bool) -> Vec<Failure> {
        let mut mistakes = Vec::new();
        if !ublk {
            mistakes.extend(given(&[(self.copy != Copying::Auto, "--copy")], "is for ublk devices; omit it"));
            let rule = "is for ublk; omit it, and use --queues for more threads";
            mistakes.extend(given(&[(self.threads_per_queue != 1, "--threads-per-queue")], rule));
        }
        let tls = self.tls.is_some_and(|tls| tls != Tls::Off) || self.tls_certificates.is_some();
        let tls_option = if self.tls_certificates.is_some() { "--tls-certificates" } else { "--tls" };
        let of_nbd = [
            (!self.listen.is_empty(), "--listen"),
            (tls, tls_option),
            (self.export_name.is_some(), "--export-name"),
            (self.max_connections.is_some(), "--max-connections"),
            (self.handshake_timeout.is_some(), "--handshake-timeout"),
            (self.insecure && self.metrics.is_none(), "--insecure"),
        ];
        if !nbd {
            mistakes.extend(given(&of_nbd, "is for NBD; add --export nbd, or omit it"));
        }
        mistakes
    }

    fn mistakes_of_image(&self) -> Vec<Failure> {
        let mut mistakes = Vec::new();
        let of_ceph = [
            (self.ceph_conf.is_some(), "--ceph-conf"),
            (self.ceph_keyring.is_some(), "--ceph-keyring"),
            (self.ceph_user.is_some(), "--ceph-user"),
        ];
        if !matches!(self.image, DriverSpec::Rbd(_)) {
            mistakes.extend(given(&of_ceph, "is for rbd:POOL/IMAGE; omit it"));
        }
        if let Some(Err(rule)) = self.ceph_user.as_deref().map(parse_ceph_user) {
            mistakes.push(Failure::new(format!("--ceph-user: {rule}")));
        }
        if let DriverSpec::Image(path) = &self.image {
            match path.as_os_str().is_empty() {
                true => mistakes.push(Failure::new("the path of the image is empty")),
                false => mistakes.extend(self.mistakes_of_format()),
            }
            return mistakes;
        }
        let is_rbd = matches!(self.image, DriverSpec::Rbd(_));
        if is_rbd && (self.queues > 1 || self.threads_per_queue > 1) {
            mistakes.push(Failure::new(
                "an RBD image is served with one queue and one thread; omit --queues and --threads-per-queue",
            ));
        }
        let of_images = [
            (self.offset != 0, "--offset"),
            (self.size_limit.is_some(), "--size-limit"),
            (self.direct_io == DirectIo::On, "--direct-io on"),
            (self.dispatch == Dispatch::Serial, "--dispatch serial"),
            (self.shared && !is_rbd, "--shared"),
            (self.register_memory, "--register-memory"),
            (self.format.is_some(), "--format"),
            (self.backing_chain != Backing::default(), "--backing-chain"),
        ];
        let rule = format!("is for image files, and {} is not one; omit it", image_text(&self.image));
        mistakes.extend(given(&of_images, &rule));
        mistakes
    }

    fn mistakes_of_format(&self) -> Vec<Failure> {
        match self.format {
            Some(Format::Qcow2) => {}
            Some(Format::Raw) | None if self.backing_chain != Backing::default() => {
                return vec![Failure::new("--backing-chain is for qcow2; add --format qcow2, or omit it")];
            }
            Some(Format::Raw | Format::Auto) | None => return Vec::new(),
        }
        let of_raw = [
            (self.offset != 0, "--offset"),
            (self.size_limit.is_some(), "--size-limit"),
            (self.dispatch == Dispatch::Serial, "--dispatch serial"),
        ];
        let mut mistakes = given(&of_raw, "is for raw images, not qcow2; omit it");
        if self.queues > 1 || self.threads_per_queue > 1 {
            mistakes.push(Failure::new(
                "a qcow2 image is served with one queue and one thread; attach the device without --queues and --threads-per-queue",
            ));
        }
        mistakes
    }
}

/// A failure for each of the `options` that is given: its name and the `rule`.
fn given(options: &[(bool, &str)], rule: &str) -> Vec<Failure> {
    let given = options.iter().filter(|(given, _)| *given);
    given.map(|(_, option)| Failure::new(format!("{option} {rule}"))).collect()
}
