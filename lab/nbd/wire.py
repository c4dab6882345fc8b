"""The NBD protocol by hand, for what no client library sends: wrong messages, and extended
headers, which Debian 12's libnbd lacks. Names and numbers are those of the NBD specification
(proto.md)."""

import socket
import struct

NBDMAGIC = 0x4E42444D41474943
IHAVEOPT = 0x49484156454F5054
OPTION_REPLY_MAGIC = 0x3E889045565A9
REQUEST_MAGIC = 0x25609513
SIMPLE_REPLY_MAGIC = 0x67446698
STRUCTURED_REPLY_MAGIC = 0x668E33EF
EXTENDED_REQUEST_MAGIC = 0x21E41C71
EXTENDED_REPLY_MAGIC = 0x6E8A278C

FLAG_FIXED_NEWSTYLE, FLAG_NO_ZEROES = 1, 2

(OPT_EXPORT_NAME, OPT_ABORT, OPT_LIST, OPT_PEEK_EXPORT, OPT_STARTTLS, OPT_INFO, OPT_GO,
 OPT_STRUCTURED_REPLY, OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT, OPT_EXTENDED_HEADERS,
 ) = range(1, 12)

REP_ACK, REP_SERVER, REP_INFO, REP_META_CONTEXT = 1, 2, 3, 4
REP_ERROR = 1 << 31
REP_ERR_UNSUP, REP_ERR_POLICY, REP_ERR_INVALID = REP_ERROR + 1, REP_ERROR + 2, REP_ERROR + 3
REP_ERR_UNKNOWN, REP_ERR_BLOCK_SIZE_REQD = REP_ERROR + 6, REP_ERROR + 8
REP_ERR_TOO_BIG, REP_ERR_EXT_HEADER_REQD = REP_ERROR + 9, REP_ERROR + 10

INFO_EXPORT, INFO_NAME, INFO_DESCRIPTION, INFO_BLOCK_SIZE = range(4)

(CMD_READ, CMD_WRITE, CMD_DISC, CMD_FLUSH, CMD_TRIM, CMD_CACHE, CMD_WRITE_ZEROES,
 CMD_BLOCK_STATUS) = range(8)

(CMD_FLAG_FUA, CMD_FLAG_NO_HOLE, CMD_FLAG_DF, CMD_FLAG_REQ_ONE, CMD_FLAG_FAST_ZERO,
 CMD_FLAG_PAYLOAD_LEN) = (1 << bit for bit in range(6))

REPLY_FLAG_DONE = 1
REPLY_NONE, REPLY_OFFSET_DATA, REPLY_OFFSET_HOLE = 0, 1, 2
REPLY_BLOCK_STATUS, REPLY_BLOCK_STATUS_EXT = 5, 6
REPLY_ERROR, REPLY_ERROR_OFFSET = (1 << 15) + 1, (1 << 15) + 2

EPERM, EIO, ENOMEM, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP = 1, 5, 12, 22, 28, 75, 95


class Closed(Exception):
    """The server closed the connection."""


class Wire:
    """One connection, driven message by message."""

    def __init__(self, path, timeout_s=20):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout_s)
        self.socket.connect(path)
        self.extended = False
        self.size = 0
        self.flags = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, message):
        """Sends all of the bytes, or raises that the server closed."""
        try:
            self.socket.sendall(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self, length):
        """Exactly `length` bytes."""
        parts = bytearray()
        while len(parts) < length:
            try:
                part = self.socket.recv(length - len(parts))
            except ConnectionResetError as error:
                raise Closed from error
            if not part:
                raise Closed(f"after {len(parts)} of {length} bytes")
            parts += part
        return bytes(parts)

    def greet(self, flags=FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES):
        """Takes the greeting and answers with the client's flags; the server's flags."""
        magic, option_magic, server_flags = struct.unpack(">QQH", self.receive(18))
        if (magic, option_magic) != (NBDMAGIC, IHAVEOPT):
            raise AssertionError(f"greeting {magic:#x} {option_magic:#x}")
        self.send(struct.pack(">I", flags))
        return server_flags

    def send_option(self, option, payload=b"", length=None, magic=IHAVEOPT):
        """Sends one option; `length` lies about the payload's when given."""
        length = len(payload) if length is None else length
        self.send(struct.pack(">QII", magic, option, length) + payload)

    def receive_option(self, option):
        """One option reply: its type and payload."""
        magic, echoed, kind, length = struct.unpack(">QIII", self.receive(20))
        if magic != OPTION_REPLY_MAGIC or echoed != option:
            raise AssertionError(f"reply {magic:#x} to option {echoed}, want {option}")
        return kind, self.receive(length)

    def option(self, option, payload=b""):
        """Sends one option; all replies up to the last (an acknowledgement or an error)."""
        self.send_option(option, payload)
        replies = [self.receive_option(option)]
        while replies[-1][0] not in (REP_ACK,) and replies[-1][0] < REP_ERROR:
            replies.append(self.receive_option(option))
        return replies

    def go(self, export="", option=OPT_GO):
        """OPT_GO or OPT_INFO with block sizes asked for; the replies."""
        name = export.encode()
        payload = struct.pack(">I", len(name)) + name + struct.pack(">HH", 1, INFO_BLOCK_SIZE)
        replies = self.option(option, payload)
        for kind, content in replies:
            if kind == REP_INFO and content[:2] == struct.pack(">H", INFO_EXPORT):
                self.size, self.flags = struct.unpack(">QH", content[2:12])
        return replies

    def ready(self, export="", structured=True):
        """Greets, agrees on structured replies when asked to, and enters transmission."""
        self.greet()
        if structured:
            self.option(OPT_STRUCTURED_REPLY)
        replies = self.go(export)
        if replies[-1][0] != REP_ACK:
            raise AssertionError(f"OPT_GO answered {replies[-1][0]:#x}")
        return self

    def set_meta_context(self, export="", context="base:allocation"):
        """Negotiates one metadata context; its id."""
        name, query = export.encode(), context.encode()
        payload = (struct.pack(">I", len(name)) + name + struct.pack(">II", 1, len(query)) + query)
        replies = self.option(OPT_SET_META_CONTEXT, payload)
        if len(replies) != 2 or replies[0][0] != REP_META_CONTEXT:
            raise AssertionError(f"set meta context answered {replies!r}")
        return struct.unpack(">I", replies[0][1][:4])[0]

    def request(self, command, offset=0, length=0, flags=0, cookie=1, payload=b"", magic=None):
        """Sends one request, compact or extended as negotiated."""
        form = ">IHHQQQ" if self.extended else ">IHHQQI"
        usual = EXTENDED_REQUEST_MAGIC if self.extended else REQUEST_MAGIC
        header = struct.pack(form, usual if magic is None else magic, flags, command, cookie, offset, length)
        self.send(header + payload)

    def simple_reply(self, read_length=0):
        """One simple reply: its error, cookie and data."""
        magic, error, cookie = struct.unpack(">IIQ", self.receive(16))
        if magic != SIMPLE_REPLY_MAGIC:
            raise AssertionError(f"reply magic {magic:#x}, want a simple reply")
        return error, cookie, b"" if error else self.receive(read_length)

    def chunk(self):
        """One chunk: flags, type, cookie, offset (extended only), payload."""
        if self.extended:
            magic, flags, kind, cookie, offset, length = struct.unpack(
                ">IHHQQQ", self.receive(32))
            usual = EXTENDED_REPLY_MAGIC
        else:
            magic, flags, kind, cookie, length = struct.unpack(">IHHQI", self.receive(20))
            offset, usual = None, STRUCTURED_REPLY_MAGIC
        if magic != usual:
            raise AssertionError(f"reply magic {magic:#x}, want {usual:#x}")
        return flags, kind, cookie, offset, self.receive(length)

    def error_of_reply(self, read_length=0):
        """The error of one whole reply of either kind on a compact connection, 0 for none."""
        magic = struct.unpack(">I", self.socket.recv(4, socket.MSG_PEEK | socket.MSG_WAITALL))[0]
        if magic == SIMPLE_REPLY_MAGIC:
            return self.simple_reply(read_length)[0]
        error, flags = 0, 0
        while not flags & REPLY_FLAG_DONE:
            flags, kind, _, _, payload = self.chunk()
            if kind & (1 << 15):
                error = struct.unpack(">I", payload[:4])[0]
        return error

    def closed(self):
        """Whether the server closes the connection within the time limit."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True
