//! Certificates as an operator puts them into ca-cert.pem, and as clients send them. A certificate that cannot be read
//! completely is refused, even if rustls reads it: rustls ignores extensions, for example keyUsage. Each authority that
//! is accepted may be one, and only those that are valid now are used.
//!
//! Input: a PEM file, or a certificate in DER.
// Contract: bounded-input

use std::time::Duration;

use blkq_export::nbd::fuzzing::{CertificateUse, authorities};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};

/// A time at which the certificates of the corpus are valid: 1 January 2027.
const NOW_S: u64 = 1_798_761_600;

/// Checks one input.
pub fn check(input: &[u8]) {
    let certificates: Vec<CertificateDer<'static>> = match input.starts_with(b"-----") {
        true => CertificateDer::pem_slice_iter(input).filter_map(Result::ok).collect(),
        false => vec![CertificateDer::from(input.to_vec())],
    };
    let count = certificates.len();
    let uses: Vec<Option<CertificateUse>> = certificates.iter().map(|it| CertificateUse::parse(it)).collect();
    if let Ok(found) = authorities(certificates, UnixTime::since_unix_epoch(Duration::from_secs(NOW_S))) {
        assert_eq!((found.all.len(), found.valid.len() + found.outdated.len()), (count, count));
        assert!(uses.iter().flatten().all(|it| it.is_authority && it.may_sign_certificates()));
        let valid = uses.iter().flatten().filter(|it| (it.not_before..=it.not_after).contains(&NOW_S));
        assert_eq!(found.valid.len(), valid.count());
    }
}
