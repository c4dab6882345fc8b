//! Asks the daemons for their counters. Each daemon is asked by a thread of its own, so that a daemon that
//! does not answer delays neither the other daemons nor the drawing.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use blkq_protocol::control::statistics::Statistics;
use blkq_protocol::control::{Request, ask_if_there};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::state::StateDir;

/// Less than the default, because there is one thread for each device.
const STACK_BYTES: usize = 256 << 10;

/// The name of a device, and its counters; `None` if the device is starting or stopping.
pub type Answer = (String, Outcome<Option<Statistics>>);

pub struct Sampler {
    dir: StateDir,
    /// Devices whose daemons have not answered yet.
    outstanding: BTreeSet<String>,
    sender: Sender<Answer>,
    answers: Receiver<Answer>,
    /// The receiving end of `waker`: readable if there are answers, because a channel cannot be polled.
    wakes: UnixStream,
    /// The threads write a byte for each answer, after they have sent it.
    waker: Arc<UnixStream>,
}

impl Sampler {
    pub fn new(dir: StateDir) -> Outcome<Sampler> {
        let failure = |e: std::io::Error| Failure::new(format!("top: cannot create a socket pair: {e}"));
        let (wakes, waker) = UnixStream::pair().map_err(failure)?;
        wakes.set_nonblocking(true).map_err(failure)?;
        waker.set_nonblocking(true).map_err(failure)?;
        let (sender, answers) = channel();
        Ok(Sampler { dir, outstanding: BTreeSet::new(), sender, answers, wakes, waker: Arc::new(waker) })
    }

    /// Does not ask daemons that have not answered the last request. Returns the names of all devices.
    pub fn ask(&mut self) -> Outcome<Vec<String>> {
        let names = self.dir.names()?;
        for name in &names {
            if self.outstanding.insert(name.clone()) {
                self.ask_one(name.clone());
            }
        }
        Ok(names)
    }

    fn ask_one(&self, name: String) {
        let (dir, sender, waker, asked) =
            (self.dir.clone(), self.sender.clone(), self.waker.clone(), name.clone());
        let answer = move |name, outcome| {
            // Sending fails only if the process is about to exit, and the receiver has been dropped.
            let _ = sender.send((name, outcome));
            let _ = (&*waker).write(&[0]);
        };
        let failed = answer.clone();
        let thread = std::thread::Builder::new().name("blkq-top".into()).stack_size(STACK_BYTES);
        let spawned = thread.spawn(move || {
            let outcome = ask_if_there::<Option<Statistics>>(&dir, &name, &Request::Stat {});
            answer(name, outcome.map(Option::flatten));
        });
        if let Err(e) = spawned {
            let why = Failure::new(format!("{asked}: cannot start a thread: {e}"));
            failed(asked, Err(why));
        }
    }

    pub fn take(&mut self) -> Vec<Answer> {
        // The bytes are read before the answers: an answer that arrives in between has a byte left, and wakes
        // the next poll.
        let mut bytes = [0; 256];
        while (&self.wakes).read(&mut bytes).is_ok_and(|count| count == bytes.len()) {}
        let answers: Vec<Answer> = self.answers.try_iter().collect();
        for (name, _) in &answers {
            self.outstanding.remove(name);
        }
        answers
    }

    pub fn wait(&mut self, deadline: Instant) -> Vec<Answer> {
        let mut answers = Vec::new();
        while !self.outstanding.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(answer) = self.answers.recv_timeout(left) else { break };
            self.outstanding.remove(&answer.0);
            answers.push(answer);
        }
        answers
    }
}

impl AsFd for Sampler {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wakes.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use blkq_protocol::control::reply_line;
    use blkq_protocol::harness::scratch;

    use super::*;
    use blkq::testing::wait_for;

    #[test]
    fn a_silent_daemon_is_asked_once_and_delays_no_other() {
        let dir = scratch("top");
        let _claims = ["answers", "silent"].map(|name| dir.claim(name).unwrap());
        let silent = UnixListener::bind(dir.control_socket("silent")).unwrap();
        let answers = UnixListener::bind(dir.control_socket("answers")).unwrap();
        let serve = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = answers.accept().unwrap();
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                stream.write_all(&reply_line(Ok(&Statistics::default()))).unwrap();
            }
        });
        let mut sampler = Sampler::new(dir.clone()).unwrap();
        for _ in 0..2 {
            assert_eq!(sampler.ask().unwrap(), ["answers", "silent"]);
            // The answer arrives although the other daemon has not answered.
            let answer = wait_for("an answer", || sampler.take().pop());
            assert_eq!(answer, ("answers".to_owned(), Ok(Some(Statistics::default()))));
        }
        serve.join().unwrap();
        // The silent daemon was asked only once.
        let (mut called, _) = silent.accept().unwrap();
        silent.set_nonblocking(true).unwrap();
        assert!(silent.accept().is_err());
        called.write_all(&reply_line::<()>(Err(Failure::new("late")))).unwrap();
        let answers = sampler.wait(Instant::now() + Duration::from_secs(30));
        let outcomes: Vec<_> = answers.into_iter().map(|(_, outcome)| outcome).collect();
        assert_eq!(outcomes, [Err(Failure::new("late"))]);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}
