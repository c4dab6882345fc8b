//! The process that started a daemon, and waits until the device is usable.

use std::io::Write;

use rustix::process::setsid;

use crate::failure::{Failure, Outcome};

/// The process that started this daemon and waits for its message on standard output.
#[derive(Debug)]
pub struct Parent {
    /// The file that standard input and output become when it has been notified; `None` if no process waits.
    null: Option<std::fs::File>,
}

impl Parent {
    /// None: this process is the one that the user started.
    pub fn none() -> Parent {
        Parent { null: None }
    }

    /// The parent of a daemon, which leaves the parent's session.
    ///
    /// # Errors
    /// If it cannot.
    pub fn new() -> Outcome<Parent> {
        setsid().map_err(|e| Failure::new(format!("setsid: {e}")))?;
        let null = std::fs::File::options().write(true).open("/dev/null");
        Ok(Parent { null: Some(null.map_err(|e| Failure::new(format!("/dev/null: {e}")))?) })
    }

    /// Whether there is one.
    pub fn waits(&self) -> bool {
        self.null.is_some()
    }

    /// Sends the parent its one message, and releases standard input and output.
    ///
    /// # Errors
    /// If the parent has exited.
    pub fn notify(&mut self, reply: &[u8]) -> Outcome {
        let Some(null) = self.null.take() else { return Ok(()) };
        let mut stdout = std::io::stdout().lock();
        let written = stdout.write_all(reply).and_then(|()| stdout.flush());
        // In any case: a daemon that takes over a device serves it without its parent, too.
        let released = rustix::stdio::dup2_stdin(&null).and_then(|()| rustix::stdio::dup2_stdout(null));
        written
            .and_then(|()| Ok(released?))
            .map_err(|e| Failure::new(format!("the command that started the daemon has exited: {e}")))
    }
}
