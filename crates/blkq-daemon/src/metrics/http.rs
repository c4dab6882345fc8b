//! The part of HTTP/1.1 (RFC 9112) that a scraper needs: one request without content and one answer per
//! connection.

/// Maximum length of a request's head in bytes.
pub const HEAD_BYTES_MAX: usize = 8 << 10;

/// A request for the metrics with GET, whose answer contains the text, or with HEAD; or a request that is rejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asked {
    Metrics { text: bool },
    Rejected(Rejection),
}

/// A rejection: status, reason phrase, and a line for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rejection(pub u16, pub &'static str, pub &'static str);

const BAD: Rejection = Rejection(400, "Bad Request", "not an HTTP/1.1 request");
const NOT_FOUND: Rejection = Rejection(404, "Not Found", "the metrics are at /metrics");
const NOT_ALLOWED: Rejection = Rejection(405, "Method Not Allowed", "only GET and HEAD are understood");
const TOO_LARGE: Rejection = Rejection(431, "Request Header Fields Too Large", "the request is too long");
const VERSION: Rejection =
    Rejection(505, "HTTP Version Not Supported", "only HTTP/1.0 and HTTP/1.1 are understood");
/// The device has stopped, and the daemon is about to exit.
pub const STOPPING: Rejection = Rejection(503, "Service Unavailable", "the device is stopping");

/// Parses a request. Returns `None` if more input is needed.
pub fn parse(input: &[u8]) -> Option<Asked> {
    // The head ends with an empty line.
    let end = input.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
    let head = match end {
        Some(end) if end <= HEAD_BYTES_MAX => &input[..end],
        Some(_) => return Some(Asked::Rejected(TOO_LARGE)),
        // Bytes that cannot become a request are rejected immediately.
        None if input.iter().any(|byte| !is_text(*byte)) => return Some(Asked::Rejected(BAD)),
        None if input.len() >= HEAD_BYTES_MAX => return Some(Asked::Rejected(TOO_LARGE)),
        None => return None,
    };
    Some(understand(head).unwrap_or_else(Asked::Rejected))
}

fn is_text(byte: u8) -> bool {
    matches!(byte, b'\t' | b'\r' | b'\n' | b' '..=b'~' | 0x80..=0xff)
}

fn understand(head: &[u8]) -> Result<Asked, Rejection> {
    if !head.iter().all(|byte| is_text(*byte)) {
        return Err(BAD);
    }
    // Header fields may contain bytes of any character set. The parts that are used here are ASCII.
    let head = String::from_utf8_lossy(head);
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (method, target, version) = match (words.next(), words.next(), words.next(), words.next()) {
        (Some(method), Some(target), Some(version), None) => (method, target, version),
        _ => return Err(BAD),
    };
    let is_token =
        |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':');
    if !is_token(method) {
        return Err(BAD);
    }
    let mut hosts = 0;
    for line in lines.filter(|line| !line.is_empty()) {
        let (name, _) = line.split_once(':').filter(|(name, _)| is_token(name)).ok_or(BAD)?;
        hosts += u32::from(name.eq_ignore_ascii_case("host"));
    }
    match version {
        "HTTP/1.1" if hosts != 1 => return Err(BAD),
        "HTTP/1.1" | "HTTP/1.0" => {}
        _ if version.starts_with("HTTP/") => return Err(VERSION),
        _ => return Err(BAD),
    }
    let text = match method {
        "GET" => true,
        "HEAD" => false,
        _ => return Err(NOT_ALLOWED),
    };
    match path(target) {
        "/metrics" => Ok(Asked::Metrics { text }),
        _ => Err(NOT_FOUND),
    }
}

/// The path of a request target, without the query. The target may be a complete URI.
fn path(target: &str) -> &str {
    let target = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => target,
    };
    target.split(['?', '#']).next().unwrap_or_default()
}

pub fn metrics(page: &str, text: bool) -> Vec<u8> {
    let head = head(200, "OK", "text/plain; version=0.0.4; charset=utf-8", page.len(), "");
    [head.as_bytes(), if text { page.as_bytes() } else { b"" }].concat()
}

pub fn rejection(Rejection(status, reason, why): Rejection) -> Vec<u8> {
    let text = format!("{why}\n");
    let allow = if status == NOT_ALLOWED.0 { "Allow: GET, HEAD\r\n" } else { "" };
    (head(status, reason, "text/plain; charset=utf-8", text.len(), allow) + &text).into_bytes()
}

fn head(status: u16, reason: &str, kind: &str, length: usize, more: &str) -> String {
    format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{more}Connection: close\r\n\r\n"
    )
}

#[cfg(test)]
mod tests {
    use blkq::random::Random;

    use super::*;

    fn status(request: &str) -> Option<u16> {
        parse(request.as_bytes()).map(|asked| match asked {
            Asked::Metrics { .. } => 200,
            Asked::Rejected(Rejection(status, ..)) => status,
        })
    }

    #[test]
    fn scrapers_are_understood() {
        let prometheus = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9100\r\nUser-Agent: Prometheus/2.53\r\nAccept: a, b;q=0.1\r\nX: \r\n\r\n";
        assert_eq!(parse(prometheus.as_bytes()), Some(Asked::Metrics { text: true }));
        for request in [
            "GET /metrics HTTP/1.0\r\n\r\n",
            "GET /metrics?name[]=a HTTP/1.1\r\nhOST: a\r\n\r\n",
            "GET http://a:1/metrics HTTP/1.1\r\nHost: a:1\r\n\r\n",
            "GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\nbody",
        ] {
            assert_eq!(status(request), Some(200), "{request}");
        }
        let head = parse(b"HEAD /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
        assert_eq!(head, Some(Asked::Metrics { text: false }));
    }

    #[test]
    fn other_requests_are_rejected_as_the_standard_requires() {
        for (request, expected) in [
            ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 404),
            ("GET /metrics/ HTTP/1.1\r\nHost: a\r\n\r\n", 404),
            ("GET http://a HTTP/1.1\r\nHost: a\r\n\r\n", 404),
            ("POST /metrics HTTP/1.1\r\nHost: a\r\n\r\n", 405),
            ("GET /metrics HTTP/2.0\r\nHost: a\r\n\r\n", 505),
            ("GET /metrics HTTP/1.1\r\n\r\n", 400),
            ("GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
            ("GET /metrics HTTP/1.1\r\nHost a\r\n\r\n", 400),
            ("GET  /metrics HTTP/1.1\r\nHost: a\r\n\r\n", 400),
            ("GET /metrics HTTP/1.1 x\r\nHost: a\r\n\r\n", 400),
            ("GET /metrics\r\n\r\n", 400),
            ("\r\n\r\n", 400),
            (" \r\n\r\n", 400),
            ("GET /metrics JUNK\r\nHost: a\r\n\r\n", 400),
            ("NBDMAGIC\0", 400),
            ("\x16\x03\x01", 400),
        ] {
            assert_eq!(status(request), Some(expected), "{request:?}");
        }
        for unfinished in ["", "G", "GET /metrics HTTP/1.1\r\nHost: a\r\n", "GET /metrics HTTP/1.1\r\n\r"] {
            assert_eq!(status(unfinished), None, "{unfinished:?}");
        }
        assert_eq!(status(&"a".repeat(HEAD_BYTES_MAX)), Some(431));
        let long = format!("GET /metrics HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "a".repeat(HEAD_BYTES_MAX));
        assert_eq!(status(&long), Some(431));
        assert_eq!(status(&long[..HEAD_BYTES_MAX - 1]), None);
    }

    #[test]
    fn no_input_makes_the_parser_panic() {
        let mut random = Random::new(1);
        for _ in 0..100_000 {
            let mut bytes = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n".to_vec();
            for _ in 0..3 {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] = random.word() as u8;
            }
            bytes.truncate(random.below(64) as usize);
            let _ = parse(&bytes);
        }
    }

    #[test]
    fn answers_state_their_length() {
        for answer in [metrics("abc\n", true), rejection(NOT_ALLOWED), rejection(STOPPING)] {
            let text = String::from_utf8(answer).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
            assert!(head.ends_with("Connection: close"));
        }
        let head = String::from_utf8(metrics("abc\n", false)).unwrap();
        assert!(head.contains("Content-Length: 4\r\n") && head.ends_with("\r\n\r\n"));
    }
}
