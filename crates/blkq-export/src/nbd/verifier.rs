//! Verifies the certificates of clients: as webpki does, and by what it does not read.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme,
};

use super::x509::CertificateUse;

/// Why a certificate that webpki would take is rejected: its keyUsage does not allow what it is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UsageError {
    /// The client's own, in the handshake (RFC 8446, 4.4.2.2).
    Signature,
    /// That of an intermediate authority (RFC 5280, 6.1.4).
    Issuer,
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UsageError::Signature => "the keyUsage of the client's certificate lacks digitalSignature",
            UsageError::Issuer => "the keyUsage of an intermediate certificate lacks keyCertSign",
        })
    }
}

impl StdError for UsageError {}

/// Checks keyUsage besides what webpki checks.
#[derive(Debug)]
pub(super) struct UsageVerifier(pub Arc<dyn ClientCertVerifier>);

/// Checks what the client's certificate and those of intermediate authorities may be used for.
fn check_usage(
    own: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
) -> Result<(), CertificateError> {
    let parse = |der: &CertificateDer<'_>| CertificateUse::parse(der).ok_or(CertificateError::BadEncoding);
    let refuse = |error| Err(CertificateError::Other(OtherError(Arc::new(error))));
    if !parse(own)?.may_sign() {
        return refuse(UsageError::Signature);
    }
    for intermediate in intermediates {
        let usage = parse(intermediate)?;
        // Of one that is no authority nothing depends.
        if usage.is_authority && !usage.may_sign_certificates() {
            return refuse(UsageError::Issuer);
        }
    }
    Ok(())
}

impl ClientCertVerifier for UsageVerifier {
    fn offer_client_auth(&self) -> bool {
        self.0.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.0.verify_client_cert(own, intermediates, now)?;
        check_usage(own, intermediates)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
