//! The NBD handshake with arbitrary clients. The server must answer each option once, in order and in bounded space, and
//! must close the connection when required, independently of how the stream is divided.
//!
//! Input: a mode byte, a byte for the division, then the stream (even mode) or a list of options (odd mode), each
//! `[option, length, choice]` followed by up to `length` bytes, depending on the choice.
// Contract: bounded-input

use blkq_export::nbd::contexts::OfferedBitmap;
use blkq_export::nbd::handshake::{
    Export, Handshake, INPUT_BYTES, Next, OPTION_MAX_BYTES, OPTION_SKIP_MAX_BYTES, OPTIONS_MAX, TlsPolicy,
};
use blkq_export::nbd::proto::{OPTION_MAGIC, OPTION_REPLY_MAGIC, TransmissionFlags, option, option_reply};

/// Upper bound for the size of all replies to one option, with these exports.
const REPLIES_MAX_BYTES: usize = 400;

fn exports(mode: u8) -> Vec<Export> {
    let export = |name: &str, description: &str| Export {
        bitmaps: [OfferedBitmap { name: "a".to_owned(), id: 0 }].into(),
        name: name.into(),
        description: description.into(),
        size_bytes: 1 << 30,
        flags: TransmissionFlags::HAS_FLAGS | TransmissionFlags::SEND_FLUSH,
        minimum_block_bytes: 512,
        preferred_block_bytes: 4096,
    };
    vec![export("disk", "a disk"), export("b", "")].into_iter().take(usize::from(mode >> 1) % 3).collect()
}

fn policy(mode: u8) -> TlsPolicy {
    match mode >> 6 {
        2 => TlsPolicy::Optional,
        3 => TlsPolicy::Required,
        _ => TlsPolicy::Off,
    }
}

/// Builds the stream of a list of options.
fn expand(mut program: &[u8]) -> Vec<u8> {
    let mut stream = vec![0, 0, 0, 3];
    while let [option, length, choice, rest @ ..] = program {
        program = rest;
        let mut take = |count: usize| {
            let (taken, rest) = program.split_at(count.min(program.len()));
            program = rest;
            taken
        };
        let name: &[u8] = [&b"disk"[..], b"b", b"", b"absent"][usize::from(choice >> 4) % 4];
        let mut data = Vec::new();
        match choice & 7 {
            0 => data.extend(take((*length).into())),
            1 => {
                let infos = take(usize::from(*length) % 8);
                data.extend((name.len() as u32).to_be_bytes());
                data.extend(name);
                data.extend((infos.len() as u16).to_be_bytes());
                data.extend(infos.iter().flat_map(|info| [0, *info]));
            }
            2 => {
                data.extend((name.len() as u32).to_be_bytes());
                data.extend(name);
                let queries = take(usize::from(*length) % 8);
                data.extend((queries.len() as u32).to_be_bytes());
                for query in queries {
                    let query: &[u8] =
                        [&b"base:allocation"[..], b"base:", b"x:y", b""][usize::from(*query) % 4];
                    data.extend((query.len() as u32).to_be_bytes());
                    data.extend(query);
                }
            }
            3 => data.extend(name),
            4 => data.resize(OPTION_MAX_BYTES - 2 + usize::from(*length) % 5, 0),
            5 => data.resize(4090 + usize::from(*length) % 20, 0),
            _ => {}
        }
        stream.extend(OPTION_MAGIC.to_be_bytes());
        stream.extend(u32::from(*option).to_be_bytes());
        stream.extend((data.len() as u32).to_be_bytes());
        stream.extend(data);
    }
    stream
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// The options in `stream`, as long as their headers are valid.
fn asked(stream: &[u8]) -> Vec<u32> {
    let mut options = Vec::new();
    let mut at = 4;
    while stream.len() >= at + 16 && stream[at..at + 8] == OPTION_MAGIC.to_be_bytes() {
        let length = word(stream, at + 12) as usize;
        if length > OPTION_SKIP_MAX_BYTES {
            break;
        }
        options.push(word(stream, at + 8));
        at += 16 + length;
    }
    options
}

/// Bytes after the start of TLS are treated as decrypted.
fn run(stream: &[u8], cut: usize, exports: &[Export], tls: TlsPolicy) -> (Vec<u8>, usize, Next) {
    let mut output = Vec::new();
    let mut handshake = Handshake::new(tls, &mut output);
    assert_eq!(output, b"NBDMAGICIHAVEOPT\0\x03");
    output.clear();
    let (mut consumed, mut arrived) = (0, 0);
    loop {
        arrived = (arrived + cut).min(stream.len());
        let (taken, next) = handshake.receive(&stream[consumed..arrived], exports, &mut output);
        consumed += taken;
        assert!(consumed <= arrived);
        if next == Next::StartTls {
            assert_ne!(tls, TlsPolicy::Off);
            continue;
        }
        if next == Next::Later {
            assert!(taken > 0, "a turn makes progress");
            continue;
        }
        if next != Next::Receive {
            // A closed session must stay closed.
            let before = output.len();
            assert_eq!(handshake.receive(&stream[consumed..], exports, &mut output), (0, Next::Close));
            assert_eq!(output.len(), before);
            return (output, consumed, next);
        }
        assert!(arrived - consumed < INPUT_BYTES, "a full buffer always makes progress");
        if arrived == stream.len() {
            return (output, consumed, next);
        }
    }
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let [mode, cut, rest @ ..] = data else { return };
    let exports = exports(*mode);
    let stream = if mode & 1 == 0 { rest.to_vec() } else { expand(rest) };
    let tls = policy(*mode);
    let (output, consumed, next) = run(&stream, stream.len().max(1), &exports, tls);
    let cut = (1 + usize::from(*cut)) * (stream.len() / 256).max(1);
    assert_eq!(run(&stream, cut, &exports, tls), (output.clone(), consumed, next));

    let asked = asked(&stream);
    assert!(output.len() <= REPLIES_MAX_BYTES * asked.len().min(OPTIONS_MAX as usize));
    // Replies must be in the order of the options, with one final reply each.
    let mut asked = asked.into_iter();
    let mut rest = &output[..];
    let mut current = None;
    let (mut answered, mut chosen) = (0, false);
    let mut open = tls != TlsPolicy::Required;
    while rest.len() >= 20 && rest[..8] == OPTION_REPLY_MAGIC.to_be_bytes() {
        let (option, reply, length) = (word(rest, 8), word(rest, 12), word(rest, 16) as usize);
        if current.is_none() {
            current = asked.next();
        }
        assert_eq!(current, Some(option));
        if reply == option_reply::ACK {
            assert!(open || option == option::STARTTLS || option == option::ABORT);
            open |= option == option::STARTTLS;
        }
        assert!(
            open || reply == option_reply::ACK || reply >= option_reply::ERR_UNSUP,
            "answered before TLS"
        );
        if reply == option_reply::ACK || reply >= option_reply::ERR_UNSUP {
            current = None;
            answered += 1;
            chosen = option == option::GO && reply == option_reply::ACK;
        }
        rest = &rest[20 + length..];
    }
    assert_eq!(current, None, "every answer is finished");
    assert!(answered <= OPTIONS_MAX);
    // The rest is the answer to NBD_OPT_EXPORT_NAME, which has no header.
    let by_name = match next {
        Next::Transmission(session) => {
            assert!(session.export < exports.len());
            !chosen && asked.next() == Some(option::EXPORT_NAME)
        }
        _ => false,
    };
    assert_eq!(chosen || by_name, matches!(next, Next::Transmission(_)));
    assert_eq!(by_name, !rest.is_empty());
    assert!(rest.is_empty() || rest.len() == 10 || rest.len() == 134);
}
