//! The rules of the options, from wherever they come: the command line, a state file, another command.
//! Options that mean nothing together are rejected, not ignored.

use blkq::drivers::DriverSpec;
use blkq::drivers::r#loop::{DirectIo, Dispatch};

use super::values::parse_export_name;
use super::{
    Address, AttachOptions, CONNECTIONS, Copying, DEPTH, Export, HANDSHAKE_TIMEOUT_S, QUEUES, Tls, image_text,
};
use crate::failure::{Failure, Outcome};

impl AttachOptions {
    /// Rejects what is invalid by the options alone.
    ///
    /// # Errors
    /// The option, why, and the cure.
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
                "--socket-mode and --socket-group are for the sockets of --listen unix:PATH and --vhost-socket; give one, outside of the state directory, which only its owner may enter",
            ));
        }
        if matches!(self.tls, Some(Tls::On | Tls::Require)) && self.tls_certificates.is_none() {
            return Err(Failure::new(
                "--tls: there are no certificates; give their directory with --tls-certificates DIR (docs/nbd.md)",
            ));
        }
        Ok(())
    }

    /// Rejects numbers and names that the command line does not take either.
    fn check_ranges(&self) -> Outcome {
        let numbers = [
            ("--queues", QUEUES, Some(self.queues)),
            ("--depth", DEPTH, Some(self.depth)),
            ("--max-connections", CONNECTIONS, self.max_connections),
            ("--handshake-timeout", HANDSHAKE_TIMEOUT_S, self.handshake_timeout),
        ];
        for (option, range, number) in numbers {
            if let Some(number) = number.filter(|number| !range.contains(number)) {
                let (least, most) = range.into_inner();
                return Err(Failure::new(format!("{option}: {number} is not from {least} to {most}")));
            }
        }
        match &self.export_name {
            Some(name) => parse_export_name(name).map(drop).map_err(Failure::new),
            None => Ok(()),
        }
    }

    /// Rejects what means nothing for the exports that were asked for or chosen.
    ///
    /// # Errors
    /// The option, why, and the cure.
    pub fn check_exports(&self, nbd: bool, ublk: bool) -> Outcome {
        if self.copy != Copying::Auto && !ublk {
            return Err(Failure::new("--copy is for ublk, and NBD copies over its socket; omit it"));
        }
        let tls = self.tls.is_some_and(|tls| tls != Tls::Off) || self.tls_certificates.is_some();
        let of_nbd = [
            (!self.listen.is_empty(), "--listen"),
            (tls, "TLS"),
            (self.export_name.is_some(), "--export-name"),
            (self.max_connections.is_some(), "--max-connections"),
            (self.handshake_timeout.is_some(), "--handshake-timeout"),
            (!self.pacing, "--no-pacing"),
            (!self.receive_backoff, "--no-receive-backoff"),
            (self.insecure && self.metrics.is_none(), "--insecure"),
        ];
        match of_nbd.iter().find(|(given, _)| *given && !nbd) {
            Some((_, option)) => {
                Err(Failure::new(format!("{option} is for NBD; add --export nbd, or omit it")))
            }
            None => Ok(()),
        }
    }

    /// Rejects what is for images only, where there is none.
    fn check_image(&self) -> Outcome {
        match &self.image {
            DriverSpec::Image(path) if path.as_os_str().is_empty() => {
                return Err(Failure::new("the path of the image is empty"));
            }
            DriverSpec::Image(_) => return Ok(()),
            DriverSpec::Null(_) | DriverSpec::Ram(_) => {}
        }
        let of_images = [
            (self.offset != 0, "--offset"),
            (self.size_limit.is_some(), "--size-limit"),
            (self.direct_io == DirectIo::On, "--direct-io on"),
            (self.dispatch == Dispatch::Serial, "--dispatch serial"),
            (self.shared, "--shared"),
            (self.register_memory, "--register-memory"),
            (self.format.is_some(), "--format"),
        ];
        match of_images.iter().find(|(given, _)| *given) {
            Some((_, option)) => Err(Failure::new(format!(
                "{option} is for images, and there is none behind {}; omit it",
                image_text(&self.image)
            ))),
            None => Ok(()),
        }
    }
}
