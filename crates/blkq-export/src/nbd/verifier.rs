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
#[derive(Debug)]
pub(super) struct UsageError(&'static str);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
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
    let refuse = |why| Err(CertificateError::Other(OtherError(Arc::new(UsageError(why)))));
    // The client's own certificate must be allowed to sign the handshake (RFC 8446, 4.4.2.2).
    if !parse(own)?.may_sign() {
        return refuse("the keyUsage of the client's certificate lacks digitalSignature");
    }
    for intermediate in intermediates {
        let usage = parse(intermediate)?;
        // An intermediate authority must be allowed to sign certificates (RFC 5280, 6.1.4). A certificate that
        // is not an authority cannot be part of the chain, so its keyUsage does not matter.
        if usage.is_authority && !usage.may_sign_certificates() {
            return refuse("the keyUsage of an intermediate certificate lacks keyCertSign");
        }
    }
    Ok(())
}

impl ClientCertVerifier for UsageVerifier {
    fn client_auth_mandatory(&self) -> bool {
        true
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
