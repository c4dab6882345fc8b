//! `--metrics`: the counters of a device for Prometheus, over HTTP.
//!
//! One thread of low priority serves all clients; it shares nothing with the engines but the
//! counters that these publish anyway. `http` is the protocol and `page` the text, both over
//! bytes in memory; `server` puts them on sockets.

mod http;
mod page;
mod server;

/// The parts of an endpoint's answers that a fuzzer knows.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use super::http::{Asked, HEAD_BYTES_MAX, Rejection, parse};
}

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use blkq_export::nbd::{Listen, Listener};
use rustix::event::{EventfdFlags, eventfd};

use crate::failure::{Failure, Outcome};

pub use page::Sample;

/// Stack of the thread.
const STACK_BYTES: usize = 256 << 10;

/// The endpoint, until this is dropped.
pub struct Endpoint {
    uri: String,
    warning: Option<String>,
    /// The state that the thread will own.
    listener: Option<Listener>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens; requests are answered from [`Endpoint::start`] on. An address that other machines
    /// reach is refused without `insecure`: the text shows how busy the device is.
    ///
    /// # Errors
    /// If it cannot or must not listen there.
    pub fn bind(listen: Listen, insecure: bool) -> Outcome<Endpoint> {
        let during = |e: Failure| e.during("--metrics");
        let listener = listen.listen().map_err(|e| during(e.into()))?;
        let public = listener.tcp_address().filter(|address| !address.ip().is_loopback());
        if let (Some(address), false) = (public, insecure) {
            return Err(during(Failure::new(format!(
                "other machines can read {address}; listen on 127.0.0.1 or a unix socket, or give --insecure"
            ))));
        }
        let warning = public.map(|address| {
            format!("every machine that reaches {address} can read the metrics of the device")
        });
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| during(Failure::new(format!("eventfd: {e}"))))?;
        Ok(Endpoint {
            uri: uri(&listener),
            warning,
            listener: Some(listener),
            stop: Arc::new(stop),
            thread: None,
        })
    }

    /// Begins to answer with what `read` returns; `None`: the device has stopped.
    ///
    /// # Errors
    /// If there can be no more threads.
    pub fn start(&mut self, read: impl Fn() -> Option<Sample> + Send + 'static) -> Outcome {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        let stop = self.stop.clone();
        let thread = std::thread::Builder::new()
            .name("blkq-metrics".into())
            .stack_size(STACK_BYTES)
            .spawn(move || server::run(&listener, &stop, &read))
            .map_err(|e| Failure::new(format!("--metrics: cannot start a thread: {e}")))?;
        self.thread = Some(thread);
        Ok(())
    }

    /// Where it is: `http://127.0.0.1:9100/metrics`, or `http+unix://` and a path.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// A warning about it.
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
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
        // Never full: it is written once.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A panic has been printed by the thread itself.
            let _ = thread.join();
        }
    }
}
