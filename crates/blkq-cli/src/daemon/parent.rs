use std::io::Write;

use rustix::process::setsid;

use crate::failure::{Failure, Outcome};

/// The process that started this daemon and reads its message from the daemon's standard output.
#[derive(Debug)]
pub struct Parent {
    /// `/dev/null`, which replaces standard input and output after the notification. `None` if no process
    /// waits.
    null: Option<std::fs::File>,
}

impl Parent {
    /// For a daemon in the foreground, which the user started directly.
    pub fn none() -> Parent {
        Parent { null: None }
    }

    /// For a daemon in the background. Starts a session, so that signals of the terminal do not reach it.
    pub fn new() -> Outcome<Parent> {
        setsid().map_err(|e| Failure::new(format!("cannot start a new session: {e}")))?;
        let null = std::fs::File::options().write(true).open("/dev/null");
        Ok(Parent { null: Some(null.map_err(|e| Failure::new(format!("cannot open /dev/null: {e}")))?) })
    }

    pub fn waits(&self) -> bool {
        self.null.is_some()
    }

    /// Redirects standard input and output to `/dev/null` afterwards. Fails if the parent has exited.
    pub fn notify(&mut self, reply: &[u8]) -> Outcome {
        let Some(null) = self.null.take() else { return Ok(()) };
        let mut stdout = std::io::stdout().lock();
        let written = stdout.write_all(reply).and_then(|()| stdout.flush());
        // Even if the parent has exited: a daemon that takes over a device serves it without its parent, too.
        let released = rustix::stdio::dup2_stdin(&null).and_then(|()| rustix::stdio::dup2_stdout(null));
        written
            .and_then(|()| Ok(released?))
            .map_err(|e| Failure::new(format!("the command that started the daemon has exited: {e}")))
    }
}
