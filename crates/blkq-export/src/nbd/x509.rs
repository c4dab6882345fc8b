//! Reads the uses that an X.509 certificate allows (RFC 5280, 4.1 and 4.2.1). webpki accepts any configured
//! certificate as an authority and does not read keyUsage.

use x509_cert::Certificate;
use x509_cert::der::Decode;
use x509_cert::der::oid::db::rfc5280::{ANY_EXTENDED_KEY_USAGE, ID_KP_SERVER_AUTH};
use x509_cert::ext::pkix::{BasicConstraints, ExtendedKeyUsage, KeyUsage};

/// The purposes and the time for which a certificate may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CertificateUse {
    /// Start of the validity, in seconds since 1970 (UTC).
    pub not_before: u64,
    /// End of the validity, in seconds since 1970 (UTC).
    pub not_after: u64,
    /// The extension basicConstraints contains CA:TRUE.
    pub is_authority: bool,
    /// `None`: the certificate has no keyUsage, so all uses are allowed.
    key_usage: Option<KeyUsage>,
    /// The extension extKeyUsage, if there is one, allows a TLS server.
    pub is_for_servers: bool,
}

impl CertificateUse {
    /// Parses a certificate in DER. Returns `None` if it is malformed.
    pub fn parse(der: &[u8]) -> Option<CertificateUse> {
        let certificate = Certificate::from_der(der).ok()?;
        let fields = certificate.tbs_certificate();
        // An extension that occurs twice is an error: its meaning would be ambiguous (RFC 5280, 4.2).
        let constraints = fields.get_extension::<BasicConstraints>().ok()?;
        let key_usage = fields.get_extension::<KeyUsage>().ok()?;
        let allows_servers = |ExtendedKeyUsage(uses): ExtendedKeyUsage| {
            uses.contains(&ANY_EXTENDED_KEY_USAGE) || uses.contains(&ID_KP_SERVER_AUTH)
        };
        Some(CertificateUse {
            not_before: fields.validity().not_before.to_unix_duration().as_secs(),
            not_after: fields.validity().not_after.to_unix_duration().as_secs(),
            is_authority: constraints.is_some_and(|(_, constraints)| constraints.ca),
            key_usage: key_usage.map(|(_, usage)| usage),
            is_for_servers: fields
                .get_extension()
                .is_ok_and(|uses| uses.is_none_or(|(_, uses)| allows_servers(uses))),
        })
    }

    /// Whether the key of the certificate may sign other certificates.
    pub fn may_sign_certificates(&self) -> bool {
        self.key_usage.is_none_or(|usage| usage.key_cert_sign())
    }

    /// Whether the key of the certificate may sign a TLS handshake.
    pub fn may_sign(&self) -> bool {
        self.key_usage.is_none_or(|usage| usage.digital_signature())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOOLEAN: u8 = 0x01;
    const INTEGER: u8 = 0x02;
    const BIT_STRING: u8 = 0x03;
    const OCTET_STRING: u8 = 0x04;
    const OBJECT_IDENTIFIER: u8 = 0x06;
    const UTC_TIME: u8 = 0x17;
    const GENERALIZED_TIME: u8 = 0x18;
    const SEQUENCE: u8 = 0x30;
    /// Context-specific, constructed tags: the version and the extensions.
    const VERSION: u8 = 0xa0;
    const EXTENSIONS: u8 = 0xa3;

    const KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x0f];
    const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 0x13];
    const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x25];
    /// `anyExtendedKeyUsage` and `id-kp-serverAuth`.
    const SERVER_USES: [&[u8]; 2] = [&[0x55, 0x1d, 0x25, 0], &[0x2b, 6, 1, 5, 5, 7, 3, 1]];

    /// Bits of the first byte of keyUsage. Bit 0 of the specification is the most significant one.
    const DIGITAL_SIGNATURE: u8 = 0x80;
    const KEY_CERT_SIGN: u8 = 0x04;

    fn element(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = content.len();
        let head = match length {
            ..0x80 => vec![tag, length as u8],
            0x80..0x100 => vec![tag, 0x81, length as u8],
            _ => vec![tag, 0x82, (length >> 8) as u8, length as u8],
        };
        [head, content.to_vec()].concat()
    }

    fn extension(name: &[u8], value: &[u8]) -> Vec<u8> {
        let parts =
            [element(OBJECT_IDENTIFIER, name), element(BOOLEAN, &[0xff]), element(OCTET_STRING, value)];
        element(SEQUENCE, &parts.concat())
    }

    fn certificate(extensions: &[Vec<u8>]) -> Vec<u8> {
        let validity = [element(UTC_TIME, b"700101000000Z"), element(GENERALIZED_TIME, b"20280229123456Z")];
        let empty = element(SEQUENCE, &[]);
        let (algorithm, bits) =
            (element(SEQUENCE, &element(OBJECT_IDENTIFIER, &[0x2b, 0x65, 0x70])), element(BIT_STRING, &[0]));
        let fields = [
            element(VERSION, &element(INTEGER, &[2])),
            element(INTEGER, &[1]),
            algorithm.clone(),
            empty.clone(),
            element(SEQUENCE, &validity.concat()),
            empty,
            element(SEQUENCE, &[algorithm.clone(), bits.clone()].concat()),
            element(EXTENSIONS, &element(SEQUENCE, &extensions.concat())),
        ];
        element(SEQUENCE, &[element(SEQUENCE, &fields.concat()), algorithm, bits].concat())
    }

    fn usage(bits: u8) -> Vec<u8> {
        extension(KEY_USAGE, &element(BIT_STRING, &[1, bits]))
    }

    fn constraints(content: &[u8]) -> Vec<u8> {
        extension(BASIC_CONSTRAINTS, &element(SEQUENCE, content))
    }

    #[test]
    fn permitted_uses_follow_from_the_extensions() {
        let parse = |extensions: &[Vec<u8>]| CertificateUse::parse(&certificate(extensions)).unwrap();
        let plain = parse(&[extension(&[0x55, 0x1d, 0x11], &[1])]);
        assert!(!plain.is_authority && plain.may_sign() && plain.may_sign_certificates());
        assert_eq!((plain.not_before, plain.not_after), (0, 1_835_440_496));
        assert!(parse(&[constraints(&element(BOOLEAN, &[0xff]))]).is_authority);
        assert!(!parse(&[constraints(&element(BOOLEAN, &[0]))]).is_authority);
        assert!(!parse(&[constraints(&element(INTEGER, &[1]))]).is_authority);
        let signs = parse(&[usage(DIGITAL_SIGNATURE)]);
        assert!(signs.may_sign() && !signs.may_sign_certificates());
        let issues = parse(&[usage(KEY_CERT_SIGN)]);
        assert!(!issues.may_sign() && issues.may_sign_certificates());
        let serves = |value: &[u8]| parse(&[extension(EXTENDED_KEY_USAGE, value)]).is_for_servers;
        let uses = |uses: &[&[u8]]| {
            let uses: Vec<u8> = uses.iter().flat_map(|name| element(OBJECT_IDENTIFIER, name)).collect();
            serves(&element(SEQUENCE, &uses))
        };
        let for_clients: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 2];
        assert!(plain.is_for_servers && uses(&[for_clients, SERVER_USES[1]]) && uses(&SERVER_USES[..1]));
        assert!(!uses(&[for_clients]) && !uses(&[]) && !serves(&[]) && !serves(&[SEQUENCE, 9]));
        // A certificate that contains an extension twice is malformed.
        assert_eq!(CertificateUse::parse(&certificate(&[usage(4), usage(0x80)])), None);
        assert_eq!(CertificateUse::parse(&certificate(&[constraints(&[]), constraints(&[])])), None);
    }

    proptest! {
        #[test]
        fn a_modified_certificate_never_leads_to_a_panic(at in 0..500_usize, byte: u8, cut in 0..500_usize) {
            let mut der = certificate(&[usage(4), constraints(&element(BOOLEAN, &[0xff]))]);
            let length = der.len();
            der[at % length] = byte;
            let _ = CertificateUse::parse(&der);
            der.truncate(cut % length);
            prop_assert_eq!(CertificateUse::parse(&der), None);
        }

        #[test]
        fn arbitrary_bytes_never_lead_to_a_panic(der: Vec<u8>, content: Vec<u8>) {
            let _ = CertificateUse::parse(&der);
            let _ = CertificateUse::parse(&certificate(&[extension(KEY_USAGE, &content)]));
        }
    }
}
