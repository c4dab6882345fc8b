//! The NBD handshake, compared with byte sequences from the specification.

use blkq_export::nbd::contexts::{Contexts, OfferedBitmap};
use blkq_export::nbd::handshake::{
    Export, Handshake, Next, OPTION_MAX_BYTES, OPTION_SKIP_MAX_BYTES, OPTIONS_MAX, QUERIES_MAX, TlsPolicy,
};
use blkq_export::nbd::proto::{TransmissionFlags, option, option_reply};
use blkq_export::nbd::reply::ReplyStyle;
use proptest::prelude::*;

fn exports() -> Vec<Export> {
    let bitmap = |name: &str, id| OfferedBitmap { name: name.to_owned(), id };
    let export = |name: &str, description: &str, size_bytes| Export {
        name: name.into(),
        description: description.into(),
        size_bytes,
        flags: TransmissionFlags::HAS_FLAGS | TransmissionFlags::SEND_FLUSH,
        minimum_block_bytes: 512,
        preferred_block_bytes: 4096,
        bitmaps: if name == "disk" { [bitmap("a", 0), bitmap("b", 1)].into() } else { [].into() },
    };
    vec![export("disk", "a disk", 0x1234_0000), export("other", "", 1 << 20)]
}

fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn reply_bytes(option: u32, reply: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x00, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9];
    bytes.extend(option.to_be_bytes());
    bytes.extend(reply.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn go_data(name: &[u8], infos: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name);
    data.extend((infos.len() as u16).to_be_bytes());
    data.extend(infos.iter().flat_map(|info| info.to_be_bytes()));
    data
}

fn context_data(name: &[u8], queries: &[&[u8]]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name);
    data.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend((query.len() as u32).to_be_bytes());
        data.extend(*query);
    }
    data
}

struct Client {
    handshake: Handshake,
    exports: Vec<Export>,
    input: Vec<u8>,
}

impl Client {
    fn new(flags: u32) -> Client {
        Client::with_tls(flags, TlsPolicy::Off)
    }

    fn with_tls(flags: u32, tls: TlsPolicy) -> Client {
        let handshake = Handshake::new(tls, &mut Vec::new());
        let mut client = Client { handshake, exports: exports(), input: Vec::new() };
        assert_eq!(client.send(&flags.to_be_bytes()), (vec![], Next::Receive));
        client
    }

    fn send(&mut self, bytes: &[u8]) -> (Vec<u8>, Next) {
        self.input.extend(bytes);
        let mut output = Vec::new();
        let (consumed, next) = self.handshake.receive(&self.input, &self.exports, &mut output);
        self.input.drain(..consumed);
        (output, next)
    }

    fn option(&mut self, option: u32, data: &[u8]) -> (Vec<u8>, Next) {
        self.send(&option_bytes(option, data))
    }

    /// Sends an option, and expects the error `reply` and that the handshake continues.
    fn refused(&mut self, option: u32, data: &[u8], reply: u32) {
        let (output, next) = self.option(option, data);
        assert_eq!(next, Next::Receive);
        assert_eq!(output[..16], reply_bytes(option, reply, &[])[..16], "option {option} with {data:?}");
    }

    /// Sends an option, and expects an acknowledgement and no other reply.
    fn acknowledged(&mut self, option: u32, data: &[u8]) {
        assert_eq!(self.option(option, data), (reply_bytes(option, option_reply::ACK, &[]), Next::Receive));
    }
}

#[test]
fn queries_of_contexts_are_bounded_and_take_several_turns() {
    let mut client = Client::new(3);
    client.acknowledged(option::STRUCTURED_REPLY, &[]);
    let queries = |count: u32| context_data(b"disk", &vec![&b"qemu:x"[..]; count as usize]);
    client.refused(option::LIST_META_CONTEXT, &queries(QUERIES_MAX + 1), option_reply::ERR_TOO_BIG);
    client.handshake.take_work();
    let (options, mut replies, mut turns) = (20, 0, 0);
    let bytes = option_bytes(option::LIST_META_CONTEXT, &queries(QUERIES_MAX)).repeat(options);
    let (mut output, mut next) = client.send(&bytes);
    loop {
        turns += 1;
        replies += output.len();
        // The last option of a turn may begin when only one item of the budget is left.
        assert!(client.handshake.take_work() <= blkq::TURN_BUDGET.items + QUERIES_MAX as usize);
        if next == Next::Receive {
            break;
        }
        assert_eq!(next, Next::Later);
        (output, next) = client.send(&[]);
    }
    assert_eq!(replies, options * reply_bytes(option::LIST_META_CONTEXT, option_reply::ACK, &[]).len());
    assert!(turns >= options, "{turns} turns for {options} options");
}

#[test]
fn the_server_greets_as_fixed_newstyle_without_zeroes() {
    let mut output = Vec::new();
    Handshake::new(TlsPolicy::Off, &mut output);
    assert_eq!(output, b"NBDMAGICIHAVEOPT\x00\x03");
}

#[test]
fn export_name_answers_with_size_flags_and_zeroes() {
    for (client_flags, zeroes) in [(1, 124), (3, 0), (0, 124)] {
        let (output, next) = Client::new(client_flags).option(option::EXPORT_NAME, b"disk");
        let mut expected = vec![0, 0, 0, 0, 0x12, 0x34, 0, 0, 0, 0x05];
        expected.resize(10 + zeroes, 0);
        assert_eq!(output, expected);
        let Next::Transmission(session) = next else { panic!("{next:?}") };
        assert_eq!((session.export, session.replies), (0, ReplyStyle::Simple));
    }
}

#[test]
fn go_describes_the_export_and_begins() {
    let mut client = Client::new(3);
    client.acknowledged(option::STRUCTURED_REPLY, &[]);
    let (output, next) = client.option(option::GO, &go_data(b"", &[3, 1, 2, 77]));
    let mut expected = reply_bytes(7, option_reply::INFO, &[0, 0, 0, 0, 0, 0, 0x12, 0x34, 0, 0, 0, 0x85]);
    expected.extend(reply_bytes(7, option_reply::INFO, b"\x00\x01disk"));
    expected.extend(reply_bytes(7, option_reply::INFO, b"\x00\x02a disk"));
    expected.extend(reply_bytes(7, option_reply::INFO, &[0, 3, 0, 0, 2, 0, 0, 0, 16, 0, 2, 0, 0, 0]));
    expected.extend(reply_bytes(7, option_reply::ACK, &[]));
    assert_eq!(output, expected);
    let Next::Transmission(session) = next else { panic!("{next:?}") };
    assert_eq!(session.replies, ReplyStyle::Structured);
    assert_eq!(session.size_bytes, 0x1234_0000);
    assert!(session.flags.contains(TransmissionFlags::SEND_DF));
    assert!(session.contexts.is_empty());
}

#[test]
fn info_describes_an_export_and_the_handshake_continues() {
    let mut client = Client::new(3);
    let (output, next) = client.option(option::INFO, &go_data(b"other", &[]));
    let mut expected = reply_bytes(6, option_reply::INFO, &[0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 5]);
    expected.extend(reply_bytes(6, option_reply::ACK, &[]));
    assert_eq!((output, next), (expected, Next::Receive));
    client.refused(option::INFO, &go_data(b"absent", &[]), option_reply::ERR_UNKNOWN);
    client.refused(option::GO, &go_data(b"absent", &[3]), option_reply::ERR_UNKNOWN);
    let (_, next) = client.option(option::GO, &go_data(b"other", &[3]));
    assert!(matches!(next, Next::Transmission(session) if session.export == 1));
}

#[test]
fn list_returns_the_name_of_every_export() {
    let mut client = Client::new(3);
    let mut expected = reply_bytes(3, option_reply::SERVER, b"\x00\x00\x00\x04diska disk");
    expected.extend(reply_bytes(3, option_reply::SERVER, b"\x00\x00\x00\x05other"));
    expected.extend(reply_bytes(3, option_reply::ACK, &[]));
    assert_eq!(client.option(option::LIST, &[]), (expected, Next::Receive));
    client.refused(option::LIST, b"x", option_reply::ERR_INVALID);
}

#[test]
fn abort_is_acknowledged_and_nothing_is_read_after_it() {
    let mut client = Client::new(3);
    let expected = (reply_bytes(2, option_reply::ACK, &[]), Next::Abort);
    assert_eq!(client.option(option::ABORT, b"ignored"), expected);
    assert_eq!(client.option(option::LIST, &[]), (vec![], Next::Close));
}

#[test]
fn metadata_contexts_need_structured_replies_and_one_export() {
    let mut client = Client::new(3);
    let base: &[u8] = b"base:allocation";
    client.refused(option::SET_META_CONTEXT, &context_data(b"", &[base]), option_reply::ERR_INVALID);
    client.acknowledged(option::STRUCTURED_REPLY, &[]);

    let reply = |option: u32, id: u32| {
        let mut data = id.to_be_bytes().to_vec();
        data.extend(base);
        let mut bytes = reply_bytes(option, option_reply::META_CONTEXT, &data);
        bytes.extend(reply_bytes(option, option_reply::ACK, &[]));
        (bytes, Next::Receive)
    };
    // A query for a list may name a namespace such as `base:`.
    for queries in [&[b"base:".as_slice()][..], &[b"x-none:1", base]] {
        assert_eq!(client.option(9, &context_data(b"disk", queries)), reply(9, 0));
    }
    client.acknowledged(option::LIST_META_CONTEXT, &context_data(b"other", &[b"qemu:dirty-bitmap:"]));
    // When contexts are set, an empty list of queries selects none, and a namespace without a name is
    // ignored.
    client.acknowledged(option::SET_META_CONTEXT, &context_data(b"disk", &[]));
    client.acknowledged(option::SET_META_CONTEXT, &context_data(b"disk", &[b"base:"]));
    client.refused(option::SET_META_CONTEXT, &context_data(b"absent", &[base]), option_reply::ERR_UNKNOWN);

    let set = |client: &mut Client, name: &[u8]| {
        let answer = client.option(option::SET_META_CONTEXT, &context_data(name, &[b"x-none:", base]));
        assert_eq!(answer, reply(10, 1));
    };
    let go = |mut client: Client, name: &[u8]| match client.option(option::GO, &go_data(name, &[])).1 {
        Next::Transmission(session) => session.contexts == Contexts::BASE_ALLOCATION,
        next => panic!("{next:?}"),
    };
    let structured = || {
        let mut client = Client::new(3);
        client.acknowledged(option::STRUCTURED_REPLY, &[]);
        client
    };
    let mut same = structured();
    set(&mut same, b"disk");
    assert!(go(same, b""));
    let mut another = structured();
    set(&mut another, b"disk");
    assert!(!go(another, b"other"));
    let mut failed_later = structured();
    set(&mut failed_later, b"disk");
    failed_later.refused(option::SET_META_CONTEXT, b"junk", option_reply::ERR_INVALID);
    assert!(!go(failed_later, b"disk"));
}

#[test]
fn qemu_contexts_are_listed_by_namespace_and_set_by_name() {
    let depth: &[u8] = b"qemu:allocation-depth";
    let (a, b): (&[u8], &[u8]) = (b"qemu:dirty-bitmap:a", b"qemu:dirty-bitmap:b");
    let all = [b"base:allocation".as_slice(), depth, a, b];
    let reply = |option: u32, contexts: &[(u32, &[u8])]| {
        let reply = |(id, name): &(u32, &[u8])| {
            reply_bytes(option, option_reply::META_CONTEXT, &[&id.to_be_bytes(), *name].concat())
        };
        let mut bytes: Vec<u8> = contexts.iter().flat_map(reply).collect();
        bytes.extend(reply_bytes(option, option_reply::ACK, &[]));
        (bytes, Next::Receive)
    };
    let mut client = Client::new(3);
    client.acknowledged(option::STRUCTURED_REPLY, &[]);
    for (query, found) in [
        (&[][..], &all[..]),
        (&[b"qemu:".as_slice()], &all[1..]),
        (&[b"qemu:dirty-bitmap:"], &all[2..]),
        (&[depth, depth], &[depth]),
        (&[b, a], &[a, b]),
        (&[b"qemu:dirty-bitmap:c", b"qemu:allocation"], &[]),
    ] {
        let found: Vec<_> = found.iter().map(|name| (0, *name)).collect();
        assert_eq!(client.option(9, &context_data(b"disk", query)), reply(9, &found));
    }
    client.acknowledged(option::SET_META_CONTEXT, &context_data(b"disk", &[b"qemu:", b"qemu:dirty-bitmap:"]));
    let set = client.option(10, &context_data(b"disk", &[b, depth]));
    assert_eq!(set, reply(10, &[(2, depth), (4, b)]));
    let (_, next) = client.option(option::GO, &go_data(b"disk", &[]));
    let Next::Transmission(session) = next else { panic!("{next:?}") };
    assert_eq!(session.contexts, Contexts::ALLOCATION_DEPTH.with(Contexts::bitmap(1)));
}

#[test]
fn extended_headers_take_precedence() {
    let mut client = Client::new(3);
    client.acknowledged(option::STRUCTURED_REPLY, &[]);
    client.refused(option::EXTENDED_HEADERS, b"x", option_reply::ERR_INVALID);
    client.acknowledged(option::EXTENDED_HEADERS, &[]);
    client.refused(option::STRUCTURED_REPLY, &[], option_reply::ERR_EXT_HEADER_REQD);
    let (_, next) = client.option(option::GO, &go_data(b"", &[]));
    assert!(matches!(next, Next::Transmission(session) if session.replies == ReplyStyle::Extended));

    let mut client = Client::new(3);
    client.acknowledged(option::EXTENDED_HEADERS, &[]);
    assert_eq!(client.option(option::EXPORT_NAME, b""), (vec![], Next::Close));
}

#[test]
fn unknown_and_malformed_options_get_an_error_reply() {
    let mut client = Client::new(3);
    client.refused(option::STARTTLS, &[], option_reply::ERR_POLICY);
    client.refused(option::STARTTLS, b"x", option_reply::ERR_INVALID);
    client.refused(4, &[], option_reply::ERR_UNSUP);
    client.refused(0xffff_ffff, b"data", option_reply::ERR_UNSUP);
    for data in [&b""[..], b"\0\0\0", &[0xff; 6], b"\0\0\0\0\0\x01", b"\0\0\0\x05abcd\0\0"] {
        client.refused(option::GO, data, option_reply::ERR_INVALID);
    }
    let mut trailing = go_data(b"disk", &[3]);
    trailing.push(0);
    client.refused(option::INFO, &trailing, option_reply::ERR_INVALID);
    client.refused(option::GO, &go_data(&[b'x'; 4097], &[]), option_reply::ERR_TOO_BIG);
    client.refused(option::GO, &go_data(&[b'x'; 4096], &[]), option_reply::ERR_UNKNOWN);
}

#[test]
fn long_options_are_skipped_and_too_long_ones_close_the_session() {
    let mut client = Client::new(3);
    client.refused(99, &vec![0; OPTION_MAX_BYTES], option_reply::ERR_UNSUP);
    client.refused(99, &vec![0; OPTION_MAX_BYTES + 1], option_reply::ERR_TOO_BIG);
    client.refused(99, &vec![b'I'; OPTION_SKIP_MAX_BYTES], option_reply::ERR_TOO_BIG);
    client.acknowledged(option::STRUCTURED_REPLY, &[]);
    let header = &option_bytes(99, &vec![0; OPTION_SKIP_MAX_BYTES + 1])[..16];
    assert_eq!(client.send(header), (vec![], Next::Close));
}

#[test]
fn an_option_that_cannot_be_answered_closes_the_session() {
    // The client sets a flag that the server did not offer.
    let mut output = Vec::new();
    let mut handshake = Handshake::new(TlsPolicy::Off, &mut output);
    assert_eq!(handshake.receive(&[0, 0, 0, 4], &exports(), &mut output), (4, Next::Close));
    // The magic number of the option is wrong.
    assert_eq!(Client::new(3).send(b"IHAVEOPS\0\0\0\x03\0\0\0\0"), (vec![], Next::Close));
    // EXPORT_NAME names an export that does not exist. Its reply cannot be an error.
    assert_eq!(Client::new(3).option(option::EXPORT_NAME, b"absent"), (vec![], Next::Close));
    let header = &option_bytes(option::EXPORT_NAME, &[b'x'; 4097])[..16];
    assert_eq!(Client::new(3).send(header), (vec![], Next::Close));
    // A client that does not use fixed newstyle may use EXPORT_NAME only.
    assert_eq!(Client::new(2).option(option::LIST, &[]), (vec![], Next::Close));
    // The client sends more options than a handshake may have.
    let mut client = Client::new(3);
    for _ in 0..OPTIONS_MAX {
        client.refused(99, &[], option_reply::ERR_UNSUP);
    }
    assert_eq!(client.option(99, &[]), (vec![], Next::Close));
}

proptest! {
    #[test]
    fn replies_do_not_depend_on_how_the_stream_is_cut(
        options in prop::collection::vec((0u32..13, prop::sample::select(vec![
            vec![], go_data(b"disk", &[3, 2]), go_data(b"absent", &[]),
            context_data(b"disk", &[b"base:allocation"]), b"other".to_vec(), vec![7; 70_000],
        ])), 0..8),
        cuts in prop::collection::vec(1usize..40_000, 0..60),
    ) {
        let mut stream = 3u32.to_be_bytes().to_vec();
        for (option, data) in &options {
            stream.extend(option_bytes(*option, data));
        }
        let exports = exports();
        let whole = {
            let mut output = Vec::new();
            let mut handshake = Handshake::new(TlsPolicy::Off, &mut output);
            let (consumed, next) = handshake.receive(&stream, &exports, &mut output);
            (output, consumed, next)
        };
        let mut output = Vec::new();
        let mut handshake = Handshake::new(TlsPolicy::Off, &mut output);
        let (mut consumed, mut arrived, mut next) = (0, 0, Next::Receive);
        let mut cuts = cuts.into_iter();
        while arrived < stream.len() && next == Next::Receive {
            arrived = (arrived + cuts.next().unwrap_or(usize::MAX / 2)).min(stream.len());
            let (taken, after) = handshake.receive(&stream[consumed..arrived], &exports, &mut output);
            consumed += taken;
            next = after;
        }
        prop_assert_eq!((output, consumed, next), whole);
    }
}

// Contract: bounded-input
#[test]
fn required_tls_must_start_before_any_other_option() {
    let mut client = Client::with_tls(3, TlsPolicy::Required);
    for (number, data) in [
        (option::LIST, vec![]),
        (option::INFO, go_data(b"disk", &[])),
        (option::GO, go_data(b"disk", &[])),
        (option::STRUCTURED_REPLY, vec![]),
        (option::EXTENDED_HEADERS, vec![]),
        (option::LIST_META_CONTEXT, context_data(b"disk", &[])),
        (option::SET_META_CONTEXT, context_data(b"disk", &[b"base:allocation"])),
        (77, vec![1]),
    ] {
        client.refused(number, &data, option_reply::ERR_TLS_REQD);
    }
    client.refused(option::STARTTLS, b"x", option_reply::ERR_INVALID);
    let (output, next) = client.option(option::STARTTLS, &[]);
    assert_eq!((output, next), (reply_bytes(option::STARTTLS, option_reply::ACK, &[]), Next::StartTls));
    client.refused(option::STARTTLS, &[], option_reply::ERR_INVALID);
    client.acknowledged(option::STRUCTURED_REPLY, &[]);
    assert!(matches!(client.option(option::GO, &go_data(b"disk", &[])).1, Next::Transmission(_)));
    // EXPORT_NAME, which cannot fail, must not bypass TLS. ABORT is allowed without TLS.
    let mut client = Client::with_tls(3, TlsPolicy::Required);
    assert_eq!(client.option(option::EXPORT_NAME, b"disk"), (vec![], Next::Close));
    let mut client = Client::with_tls(3, TlsPolicy::Required);
    assert_eq!(client.option(option::ABORT, &[]).1, Next::Abort);
}

/// A man in the middle can insert options before TLS starts (CVE-2021-3716), or after STARTTLS.
// Contract: bounded-input
#[test]
fn negotiation_before_tls_is_discarded_when_tls_starts() {
    for chosen in [option::STRUCTURED_REPLY, option::EXTENDED_HEADERS] {
        let mut client = Client::with_tls(3, TlsPolicy::Optional);
        client.acknowledged(chosen, &[]);
        let contexts = context_data(b"disk", &[b"base:allocation"]);
        assert_eq!(client.option(option::SET_META_CONTEXT, &contexts).1, Next::Receive);
        let injected = [option_bytes(option::STARTTLS, &[]), option_bytes(chosen, &[])].concat();
        let (output, next) = client.send(&injected);
        assert_eq!(output, reply_bytes(option::STARTTLS, option_reply::ACK, &[]));
        assert_eq!(next, Next::StartTls);
        assert_eq!(client.input, option_bytes(chosen, &[]), "what follows in clear is not consumed");
        client.input.clear();
        let (_, next) = client.option(option::GO, &go_data(b"disk", &[]));
        let Next::Transmission(session) = next else { panic!("{next:?}") };
        assert_eq!((session.replies, session.contexts), (ReplyStyle::Simple, Contexts::default()));
    }
}

#[test]
fn large_minimum_blocks_require_a_block_size_request() {
    let large = || {
        let mut client = Client::new(3);
        client.exports[1].minimum_block_bytes = 4096;
        client
    };
    // The server sends the block sizes before the error, so that the client need not request them.
    let mut expected = reply_bytes(7, option_reply::INFO, &[0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 5]);
    expected.extend(reply_bytes(7, option_reply::INFO, &[0, 3, 0, 0, 16, 0, 0, 0, 16, 0, 2, 0, 0, 0]));
    let text = b"the minimum block size is 4096 bytes; request NBD_INFO_BLOCK_SIZE first";
    expected.extend(reply_bytes(7, option_reply::ERR_BLOCK_SIZE_REQD, text));
    let mut client = large();
    assert_eq!(client.option(option::GO, &go_data(b"other", &[])), (expected, Next::Receive));
    // The client may request the sizes in the next GO, or may have requested them with INFO. The sizes of
    // another export do not count.
    assert!(matches!(client.option(option::GO, &go_data(b"other", &[3])).1, Next::Transmission(_)));
    for (asked, refused) in [("other", false), ("disk", true)] {
        let mut client = large();
        assert_eq!(client.option(option::INFO, &go_data(asked.as_bytes(), &[3])).1, Next::Receive);
        let (_, next) = client.option(option::GO, &go_data(b"other", &[]));
        assert_eq!(next == Next::Receive, refused, "{asked}");
    }
    // INFO and EXPORT_NAME do not need the request, nor does GO if the minimum block size is 512 bytes.
    let (output, _) = large().option(option::INFO, &go_data(b"other", &[]));
    assert!(output.ends_with(&reply_bytes(6, option_reply::ACK, &[])));
    assert!(matches!(large().option(option::EXPORT_NAME, b"other").1, Next::Transmission(_)));
    assert!(matches!(large().option(option::GO, &go_data(b"disk", &[])).1, Next::Transmission(_)));
}

#[test]
fn a_stopping_server_answers_options_with_shutdown() {
    let mut client = Client::new(3);
    client.handshake.shut_down();
    for option in [option::LIST, option::INFO, option::GO, option::STRUCTURED_REPLY, option::STARTTLS, 99] {
        client.refused(option, &[], option_reply::ERR_SHUTDOWN);
    }
    let (output, next) = client.option(option::ABORT, &[]);
    assert_eq!((output, next), (reply_bytes(option::ABORT, option_reply::ACK, &[]), Next::Abort));
    let mut client = Client::new(3);
    client.handshake.shut_down();
    assert_eq!(client.option(option::EXPORT_NAME, b"disk"), (vec![], Next::Close));
}
