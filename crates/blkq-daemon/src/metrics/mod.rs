//! `--metrics`: the counters of a device for Prometheus, over HTTP.
//!
//! One thread of low priority serves all clients. It shares only the published counters with the engines.
//! `http` implements the protocol and `page` renders the text, both in memory; `server` handles the sockets.

mod http;
mod page;
mod server;

/// The parts of the endpoint that a fuzz target calls.
#[cfg(fuzz_interface)]
#[doc(hidden)]
pub mod fuzzing {
    pub use super::http::{Asked, HEAD_BYTES_MAX, Rejection, parse};
}

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use blkq_export::{Listen, Listener, SocketAccess};
use blkq_protocol::failure::{Failure, Outcome};
use rustix::event::{EventfdFlags, eventfd};

pub use page::Sample;

const STACK_BYTES: usize = 256 << 10;

/// The metrics endpoint, which serves until this is dropped.
pub struct Endpoint {
    /// `http://127.0.0.1:9100/metrics`, or `http+unix://` and a path.
    pub uri: String,
    pub warning: Option<String>,
    /// Moved to the thread when it starts.
    listener: Option<Listener>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// The failure for an address that other machines can reach.
pub fn exposed(address: &SocketAddr) -> Failure {
    Failure::new(format!(
        "other machines can read {address}; listen on 127.0.0.1 or a unix socket, or use --insecure"
    ))
}

impl Endpoint {
    /// Listens. Requests are answered only after [`Endpoint::start`]. Refuses an address that other machines
    /// can reach unless `insecure` is set, because the metrics show how busy the device is.
    pub fn bind(listen: Listen, insecure: bool) -> Outcome<Endpoint> {
        let during = |e: Failure| e.during("--metrics");
        let listener = listen.listen(SocketAccess::default()).map_err(|e| during(e.into()))?;
        let public = listener.tcp_address().filter(|address| !address.ip().is_loopback());
        if let (Some(address), false) = (public, insecure) {
            return Err(during(exposed(&address)));
        }
        let warning = public.map(|address| {
            format!("every machine that can reach {address} can read the metrics of the device")
        });
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| during(Failure::new(format!("cannot create an eventfd: {e}"))))?;
        let (uri, stop) = (uri(&listener), Arc::new(stop));
        Ok(Endpoint { uri, warning, listener: Some(listener), stop, thread: None })
    }

    /// Starts the thread. It answers with what `read` returns, or that the device is stopping if that is
    /// `None`.
    pub fn start(&mut self, read: impl Fn() -> Option<Sample> + Send + 'static) -> Outcome {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        let stop = self.stop.clone();
        let thread = std::thread::Builder::new().name("blkq-metrics".into()).stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || server::run(&listener, &stop, &read));
        let failed = |e| Failure::new(format!("--metrics: cannot start a thread: {e}"));
        self.thread = Some(spawned.map_err(failed)?);
        Ok(())
    }
}

fn uri(listener: &Listener) -> String {
    match (listener.tcp_address(), listener.unix_path()) {
        (Some(address), _) => format!("http://{address}/metrics"),
        (_, Some(path)) => format!("http+unix://{}", path.display()),
        _ => String::new(),
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // This does not block: the eventfd is written only once.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, it has already printed a message.
            let _ = thread.join();
        }
    }
}
