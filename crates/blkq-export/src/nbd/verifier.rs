//! Verifies client certificates: keyUsage must allow their use, which webpki does not check.

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

/// The reason why a certificate that webpki accepts is rejected: its keyUsage does not allow the use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum UsageError {
    /// The client's own certificate must be allowed to sign the handshake (RFC 8446, 4.4.2.2).
    Signature,
    /// The certificate of an intermediate authority must be allowed to sign certificates (RFC 5280, 6.1.4).
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

#[derive(Debug)]
pub(super) struct UsageVerifier {
    pub inner: Arc<dyn ClientCertVerifier>,
    /// Whether an authority is valid. If not, all clients are refused; `inner` does not check this.
    pub has_authority: bool,
}

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
        // A certificate that is not an authority cannot be part of the chain, so its keyUsage does not
        // matter.
        if usage.is_authority && !usage.may_sign_certificates() {
            return refuse(UsageError::Issuer);
        }
    }
    Ok(())
}

impl ClientCertVerifier for UsageVerifier {
    fn offer_client_auth(&self) -> bool {
        self.inner.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        if !self.has_authority {
            return Err(CertificateError::UnknownIssuer.into());
        }
        let verified = self.inner.verify_client_cert(own, intermediates, now)?;
        check_usage(own, intermediates)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
