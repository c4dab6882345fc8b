//! Reads the uses that an X.509 certificate allows (RFC 5280, 4.1 and 4.2.1). webpki accepts any configured
//! certificate as an authority and does not read keyUsage.
//!
//! Clients send these certificates, so each length is checked and a malformed certificate is rejected.

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

/// Object identifiers `id-ce-keyUsage`, `id-ce-basicConstraints` and `id-ce-extKeyUsage`.
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x0f];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 0x13];
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x25];
/// Object identifiers `anyExtendedKeyUsage` and `id-kp-serverAuth`, one of which a TLS server needs.
const SERVER_USES: [&[u8]; 2] = [&[0x55, 0x1d, 0x25, 0], &[0x2b, 6, 1, 5, 5, 7, 3, 1]];

/// Bits of the first byte of keyUsage. Bit 0 of the specification is the most significant one.
const DIGITAL_SIGNATURE: u8 = 0x80;
const KEY_CERT_SIGN: u8 = 0x04;

/// The purposes and the time for which a certificate may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CertificateUse {
    /// Start of the validity, in seconds since 1970 (UTC).
    pub not_before: i64,
    /// End of the validity, in seconds since 1970 (UTC).
    pub not_after: i64,
    /// The extension basicConstraints contains CA:TRUE.
    pub is_authority: bool,
    /// First byte of keyUsage. `None`: the certificate has no keyUsage, so all uses are allowed.
    key_usage: Option<u8>,
    /// The extension extKeyUsage, if there is one, allows a TLS server.
    pub is_for_servers: bool,
}

impl CertificateUse {
    /// Parses a certificate in DER. Returns `None` if it is malformed.
    pub fn parse(der: &[u8]) -> Option<CertificateUse> {
        let mut certificate = Reader(Reader(der).take(SEQUENCE)?);
        let mut fields = Reader(certificate.take(SEQUENCE)?);
        fields.take_if(VERSION)?;
        fields.take(INTEGER)?; // serial number
        fields.take(SEQUENCE)?; // signature algorithm
        fields.take(SEQUENCE)?; // issuer
        let mut validity = Reader(fields.take(SEQUENCE)?);
        let (not_before, not_after) = (time(validity.element()?)?, time(validity.element()?)?);
        fields.take(SEQUENCE)?; // subject
        fields.take(SEQUENCE)?; // public key
        let mut parsed = CertificateUse {
            not_before,
            not_after,
            is_authority: false,
            key_usage: None,
            is_for_servers: true,
        };
        let mut has_constraints = false;
        while !fields.0.is_empty() {
            let (tag, content) = fields.element()?;
            if tag != EXTENSIONS {
                continue; // unique identifiers
            }
            let mut extensions = Reader(Reader(content).take(SEQUENCE)?);
            while !extensions.0.is_empty() {
                let mut extension = Reader(extensions.take(SEQUENCE)?);
                let name = extension.take(OBJECT_IDENTIFIER)?;
                extension.take_if(BOOLEAN)?; // critical
                let value = extension.take(OCTET_STRING)?;
                match name {
                    BASIC_CONSTRAINTS if !std::mem::replace(&mut has_constraints, true) => {
                        let is_authority = Reader(Reader(value).take(SEQUENCE)?).take_if(BOOLEAN)?;
                        parsed.is_authority = is_authority.is_some_and(|value| value != [0]);
                    }
                    KEY_USAGE if parsed.key_usage.is_none() => {
                        // The first byte of a bit string is the number of unused bits.
                        parsed.key_usage = Some(*Reader(value).take(BIT_STRING)?.get(1).unwrap_or(&0));
                    }
                    EXTENDED_KEY_USAGE => parsed.is_for_servers &= allows_servers(value) == Some(true),
                    // An extension must not occur twice (RFC 5280, 4.2): its meaning would be ambiguous.
                    BASIC_CONSTRAINTS | KEY_USAGE => return None,
                    _ => {}
                }
            }
        }
        Some(parsed)
    }

    /// Whether the key of the certificate may sign other certificates.
    pub fn may_sign_certificates(&self) -> bool {
        self.key_usage.is_none_or(|usage| usage & KEY_CERT_SIGN != 0)
    }

    /// Whether the key of the certificate may sign a TLS handshake.
    pub fn may_sign(&self) -> bool {
        self.key_usage.is_none_or(|usage| usage & DIGITAL_SIGNATURE != 0)
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    /// Reads the tag and the content of the next element.
    fn element(&mut self) -> Option<(u8, &'a [u8])> {
        let (&[tag, first], rest) = self.0.split_first_chunk()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            // Content of 16 MiB or more cannot occur: neither a file nor a TLS message is that large.
            0x81..=0x83 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 3))?;
                (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        self.0 = rest;
        Some((tag, content))
    }

    fn take(&mut self, tag: u8) -> Option<&'a [u8]> {
        let (found, content) = self.element()?;
        (found == tag).then_some(content)
    }

    /// As [`Reader::take`], if the next element has the tag. The outer `None`: the element is malformed.
    fn take_if(&mut self, tag: u8) -> Option<Option<&'a [u8]>> {
        if self.0.first() == Some(&tag) { self.take(tag).map(Some) } else { Some(None) }
    }
}

fn allows_servers(extended_key_usage: &[u8]) -> Option<bool> {
    let mut uses = Reader(Reader(extended_key_usage).take(SEQUENCE)?);
    let mut found = false;
    while !uses.0.is_empty() {
        found |= SERVER_USES.contains(&uses.take(OBJECT_IDENTIFIER)?);
    }
    Some(found)
}

/// Converts a time to seconds since 1970. DER requires UTC ("Z") without fractions of a second.
fn time((tag, text): (u8, &[u8])) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    let (year, rest) = match tag {
        UTC_TIME if digits.len() == 12 => {
            let year = number(&digits[..2])?;
            (if year < 50 { 2000 + year } else { 1900 + year }, &digits[2..])
        }
        GENERALIZED_TIME if digits.len() == 14 => (number(&digits[..4])?, &digits[4..]),
        _ => return None,
    };
    let field = |index: usize| number(&rest[2 * index..2 * index + 2]);
    let (month, day) = (field(0)?, field(1)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // The year is counted from March, so that a leap day is the last day of its year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = days + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(((days * 24 + field(2)?) * 60 + field(3)?) * 60 + field(4)?)
}

fn number(digits: &[u8]) -> Option<i64> {
    digits
        .iter()
        .try_fold(0, |number, digit| digit.is_ascii_digit().then(|| number * 10 + i64::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn element(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = content.len();
        let head = if length < 0x80 {
            vec![tag, length as u8]
        } else {
            vec![tag, 0x82, (length >> 8) as u8, length as u8]
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
        let fields = [
            element(VERSION, &element(INTEGER, &[2])),
            element(INTEGER, &[1]),
            empty.clone(),
            empty.clone(),
            element(SEQUENCE, &validity.concat()),
            empty.clone(),
            empty.clone(),
            element(EXTENSIONS, &element(SEQUENCE, &extensions.concat())),
        ];
        element(SEQUENCE, &[element(SEQUENCE, &fields.concat()), empty, element(BIT_STRING, &[0])].concat())
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

    #[test]
    fn times_are_read_as_utc() {
        let utc = |text: &[u8]| time((UTC_TIME, text));
        assert_eq!(utc(b"491231235959Z"), Some(2_524_607_999));
        assert_eq!(utc(b"500101000000Z"), Some(-631_152_000));
        assert_eq!(time((GENERALIZED_TIME, b"20000301000000Z")), Some(951_868_800));
        for wrong in
            [&b"4912312359Z"[..], b"491331235959Z", b"491200235959Z", b"49123123595xZ", b"491231235959", b""]
        {
            assert_eq!(utc(wrong), None);
        }
        assert_eq!(time((SEQUENCE, b"491231235959Z")), None);
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
