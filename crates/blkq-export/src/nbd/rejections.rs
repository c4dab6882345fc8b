//! The reports of clients that the server rejected or disconnected.

/// The reason why the server rejected or disconnected a client.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// The given maximum number of connections was reached.
    TooMany(usize),
    /// There was no memory for another connection.
    NoMemory,
    /// The server requires TLS and the client did not ask for it.
    WithoutTls,
    /// TLS failed; the text says how.
    Tls(String),
    /// The client broke the protocol in the handshake.
    Handshake,
    /// The client broke the protocol in the transmission phase.
    Request,
    /// The client did not finish its handshake, send a payload or take its replies in time.
    Late,
}

/// A client that the server rejected or disconnected.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Rejection {
    /// The client: `pid 123, uid 0` for a unix socket, or its address and port.
    pub peer: String,
    /// The reason of the rejection.
    pub reason: Reason,
    /// The number of earlier rejections of this kind that were counted only.
    pub unreported: u64,
    /// Whether further rejections of this kind are counted only, until a minute has passed.
    pub last: bool,
}
