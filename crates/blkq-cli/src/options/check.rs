//! The rules for combinations of options, no matter where the options come from: the command line, a state
//! file or another command. Options that have no effect together are rejected, not ignored.

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
    /// Rejects options that are invalid regardless of the image and the kernel.
    ///
    /// # Errors
    ///
    /// Names the option and the reason, with a hint.
    pub fn check(&self) -> Outcome {
        self.check_ranges()?;
        if !self.exports.is_empty() {
            let asked = |export| self.exports.contains(&export);
            self.check_exports(asked(Export::Nbd), asked(Export::Ublk))?;
        }
        if self.vhost_socket.is_some() && !self.exports.contains(&Export::VhostUserBlk) {
            return Err(Failure::new(
                "--vhost-socket is for vhost-user-blk; add --export vhost-user-blk, or omit it",
            ));
        }
        if self.register_memory && !self.exports.contains(&Export::VhostUserBlk) {
            return Err(Failure::new(
                "--register-memory is for vhost-user-blk; add --export vhost-user-blk, or omit it",
            ));
        }
        self.check_image()?;
        let is_unix = |address: &Address| matches!(address, Address::Unix(_));
        let has_socket = self.vhost_socket.is_some() || self.listen.iter().any(is_unix);
        if (self.socket_mode.is_some() || self.socket_group.is_some()) && !has_socket {
            return Err(Failure::new(
                "--socket-mode and --socket-group apply to the sockets of --listen unix:PATH and --vhost-socket; add one of these options, with a path outside of the state directory, which only its owner can enter",
            ));
        }
        if matches!(self.tls, Some(Tls::On | Tls::Require)) && self.tls_certificates.is_none() {
            return Err(Failure::new("--tls needs certificates; add --tls-certificates DIR (docs/nbd.md)"));
        }
        Ok(())
    }

    /// Checks numbers and names. The command line rejects the same ones, but a state file may contain them.
    fn check_ranges(&self) -> Outcome {
        let numbers = [
            ("--queues", QUEUES, Some(self.queues)),
            ("--threads-per-queue", QUEUES, Some(self.threads_per_queue)),
            ("--queues times --threads-per-queue", QUEUES, self.queues.checked_mul(self.threads_per_queue)),
            ("--depth", DEPTH, Some(self.depth)),
            ("--max-connections", CONNECTIONS, self.max_connections),
            ("--handshake-timeout", HANDSHAKE_TIMEOUT_S, self.handshake_timeout),
        ];
        for (option, range, number) in numbers {
            if let Some(number) = number.filter(|number| !range.contains(number)) {
                let (least, most) = range.into_inner();
                return Err(Failure::new(format!("{option} must be {least} to {most}, not {number}")));
            }
        }
        if let Some(weight) = self.weight.filter(|weight| !(1..=WEIGHT_MAX).contains(weight)) {
            return Err(Failure::new(format!("--weight must be 1 to {WEIGHT_MAX}, not {weight}")));
        }
        match &self.group {
            Some(_) if self.limit == LimitMode::Auto => {
                return Err(Failure::new(
                    "--limit auto is not possible in a group; omit --group, or set fixed limits",
                ));
            }
            Some(name) => parse_group_name(name).map(drop).map_err(Failure::new)?,
            None if self.weight.is_some() => {
                return Err(Failure::new("--weight has no effect without a group; add --group, or omit it"));
            }
            None => {}
        }
        match &self.export_name {
            Some(name) => parse_export_name(name).map(drop).map_err(Failure::new),
            None => Ok(()),
        }
    }

    /// Rejects options that have no effect on the given exports.
    ///
    /// # Errors
    ///
    /// Names the option and the reason, with a hint.
    pub fn check_exports(&self, nbd: bool, ublk: bool) -> Outcome {
        if self.copy != Copying::Auto && !ublk {
            return Err(Failure::new("--copy is for ublk devices; omit it"));
        }
        if self.threads_per_queue != 1 && !ublk {
            return Err(Failure::new(
                "--threads-per-queue is for ublk; omit it, and use --queues for more threads",
            ));
        }
        let tls = self.tls.is_some_and(|tls| tls != Tls::Off) || self.tls_certificates.is_some();
        let of_nbd = [
            (!self.listen.is_empty(), "--listen"),
            (tls, "TLS"),
            (self.export_name.is_some(), "--export-name"),
            (self.max_connections.is_some(), "--max-connections"),
            (self.handshake_timeout.is_some(), "--handshake-timeout"),
            (!self.receive_backoff, "--no-receive-backoff"),
            (!self.split_reads, "--no-split-reads"),
            (self.insecure && self.metrics.is_none(), "--insecure"),
        ];
        match of_nbd.iter().find(|(given, _)| *given && !nbd) {
            Some((_, option)) => {
                Err(Failure::new(format!("{option} is for NBD; add --export nbd, or omit it")))
            }
            None => Ok(()),
        }
    }

    /// Rejects options that need an image, or an image of another kind.
    fn check_image(&self) -> Outcome {
        let of_ceph = [
            (self.ceph_conf.is_some(), "--ceph-conf"),
            (self.ceph_keyring.is_some(), "--ceph-keyring"),
            (self.ceph_user.is_some(), "--ceph-user"),
        ];
        if let Some((_, option)) = of_ceph.iter().find(|(given, _)| *given)
            && !matches!(self.image, DriverSpec::Rbd(_))
        {
            return Err(Failure::new(format!("{option} is for rbd:POOL/IMAGE; omit it")));
        }
        if let Some(user) = &self.ceph_user {
            parse_ceph_user(user).map_err(|rule| Failure::new(format!("--ceph-user: {rule}")))?;
        }
        match &self.image {
            DriverSpec::Image(path) if path.as_os_str().is_empty() => {
                return Err(Failure::new("the path of the image is empty"));
            }
            DriverSpec::Image(_) => return self.check_format(),
            DriverSpec::Rbd(_) if self.queues > 1 || self.threads_per_queue > 1 => {
                return Err(Failure::new(
                    "an RBD image is served with one queue and one thread; omit --queues and --threads-per-queue",
                ));
            }
            DriverSpec::Rbd(_) | DriverSpec::Null(_) | DriverSpec::Ram(_) => {}
        }
        let of_images = [
            (self.offset != 0, "--offset"),
            (self.size_limit.is_some(), "--size-limit"),
            (self.direct_io == DirectIo::On, "--direct-io on"),
            (self.dispatch == Dispatch::Serial, "--dispatch serial"),
            (self.shared && !matches!(self.image, DriverSpec::Rbd(_)), "--shared"),
            (self.register_memory, "--register-memory"),
            (self.format.is_some(), "--format"),
            (self.backing_chain != Backing::default(), "--backing-chain"),
        ];
        match of_images.iter().find(|(given, _)| *given) {
            Some((_, option)) => Err(Failure::new(format!(
                "{option} is for image files, and {} is not one; omit it",
                image_text(&self.image)
            ))),
            None => Ok(()),
        }
    }

    /// Rejects options that apply only to raw images, or only to qcow2 images.
    fn check_format(&self) -> Outcome {
        if !matches!(self.format, Some(Format::Qcow2 | Format::Auto)) {
            return match self.backing_chain == Backing::default() {
                true => Ok(()),
                false => Err(Failure::new("--backing-chain is for qcow2; add --format qcow2, or omit it")),
            };
        }
        let of_raw = [
            (self.offset != 0, "--offset"),
            (self.size_limit.is_some(), "--size-limit"),
            (self.dispatch == Dispatch::Serial, "--dispatch serial"),
        ];
        if let Some((_, option)) =
            of_raw.iter().find(|(given, _)| *given && self.format == Some(Format::Qcow2))
        {
            return Err(Failure::new(format!("{option} is for raw images, not qcow2; omit it")));
        }
        if self.format == Some(Format::Qcow2) && (self.queues > 1 || self.threads_per_queue > 1) {
            return Err(Failure::new(
                "a qcow2 image is served with one queue and one thread; attach the device without --queues and --threads-per-queue",
            ));
        }
        Ok(())
    }
}
