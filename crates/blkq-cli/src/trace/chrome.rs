//! Writes trace events as JSON, which Perfetto and chrome://tracing open. Each request is a slice that
//! contains a slice per stage.

use std::io::{self, Write};

use blkq::trace::TraceEvent;
use serde_json::{Value, json};

use super::io_tracker::CompletedRequest;
use super::item::client_name;

/// The process ID that represents the device in the file.
const PROCESS: u32 = 1;

/// How a file begins.
pub const HEAD: &[u8] = b"[\n{\"args\":{\"name\":\"blkq ";

pub struct ChromeWriter<W: Write> {
    out: W,
    since_ns: u64,
    requests: u64,
}

impl<W: Write> ChromeWriter<W> {
    /// Begins a file for the device `name` with the given number of queues. Times in the file are relative to
    /// `since_ns`.
    pub fn new(mut out: W, name: &str, queues: usize, since_ns: u64) -> io::Result<ChromeWriter<W>> {
        let name_of = |what: &str, thread: usize, name: &str| json!({"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": {"name": name}});
        write!(out, "[\n{}", name_of("process_name", 0, &format!("blkq {name}")))?;
        for queue in 0..queues {
            write!(out, ",\n{}", name_of("thread_name", queue, &format!("queue {queue}")))?;
        }
        Ok(ChromeWriter { out, since_ns, requests: 0 })
    }

    /// Writes a request of `queue`: a slice for its whole duration, and within it a slice per stage.
    pub fn request(&mut self, queue: usize, request: &CompletedRequest) -> io::Result<()> {
        let Some((_, begin_ns)) = request.stages.first() else { return Ok(()) };
        self.requests += 1;
        let TraceEvent { operation, sector, bytes, client, status, time_ns, .. } = request.completion;
        let mut slice = |phase: char, name: &Value, ns: u64, args: Option<Value>| {
            let us = ns.saturating_sub(self.since_ns) as f64 / 1e3;
            let mut event = json!({
                "ph": phase, "cat": "request", "id": self.requests, "pid": PROCESS, "tid": queue, "name": name, "ts": us,
            });
            if let Some(args) = args {
                event["args"] = args;
            }
            write!(self.out, ",\n{event}")
        };
        let name = json!(format!("{} {} + {}", operation.name(), sector.0, bytes >> 9));
        let arguments = json!({
            "sector": sector.0,
            "bytes": bytes,
            "client": client_name(client),
            "error": status.map(|status| status.to_string()),
        });
        slice('b', &name, *begin_ns, Some(arguments))?;
        let ends = request.stages[1..].iter().map(|(_, ns)| *ns).chain([time_ns]);
        for ((stage, begin_ns), end_ns) in request.stages.iter().zip(ends) {
            slice('b', &json!(stage), *begin_ns, None)?;
            slice('e', &json!(stage), end_ns, None)?;
        }
        slice('e', &name, time_ns, None)
    }

    pub fn finish(mut self) -> io::Result<()> {
        self.out.write_all(b"\n]\n")?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use blkq::trace::EventKind;
    use blkq::{Operation, Sector, Status};

    use super::super::io_tracker::Stage;
    use super::*;

    #[test]
    fn the_stages_of_a_request_lie_inside_of_its_slice() {
        let mut bytes = Vec::new();
        let mut writer = ChromeWriter::new(&mut bytes, "a", 2, 1000).unwrap();
        let completion = TraceEvent {
            operation: Operation::Write,
            sector: Sector(8),
            bytes: 4096,
            status: Some(Status::Io),
            ..TraceEvent::of_plug(EventKind::Complete, 0, 9000)
        };
        let request =
            CompletedRequest { stages: vec![(Stage::Queued, 2000), (Stage::Driver, 3500)], completion };
        writer.request(1, &request).unwrap();
        writer.finish().unwrap();
        assert!(bytes.starts_with(HEAD));
        let events: Vec<Value> = serde_json::from_slice(&bytes).unwrap();
        let slices: Vec<_> = events.iter().filter(|event| event["ph"] != "M").collect();
        let found: Vec<_> = slices
            .iter()
            .map(|event| (&event["ph"], &event["name"], event["ts"].as_f64().unwrap()))
            .collect();
        let (begin, end, name) = (json!("b"), json!("e"), json!("write 8 + 8"));
        let (queued, driver) = (json!("queued"), json!("driver"));
        let expected = [
            (&begin, &name, 1.0),
            (&begin, &queued, 1.0),
            (&end, &queued, 2.5),
            (&begin, &driver, 2.5),
            (&end, &driver, 8.0),
            (&end, &name, 8.0),
        ];
        assert_eq!(found, expected);
        assert_eq!(slices[0]["args"]["error"], "I/O error");
    }
}
