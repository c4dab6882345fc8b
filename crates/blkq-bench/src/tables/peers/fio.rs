//! fio, the client of all peers, with the same job for each.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::child::Child;
use crate::load::Load;
use crate::measurement::Run;
use crate::metric::Metric;
use crate::process::Usage;
use crate::{Result, ensure};

/// How long fio may take in addition to the length of a job, or for a job without a length.
const EXIT_WAIT: Duration = Duration::from_secs(30);

/// A workload for all peers.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub title: &'static str,
    /// Value of fio's option `--rw`.
    rw: &'static str,
    pub block_bytes: u32,
    pub depth: usize,
    pub quick: bool,
}

/// Jobs with larger blocks warm the server up first: a server then sends more per run than the socket buffers of a
/// whole run with small blocks.
const LARGE_BYTES: u32 = 128 << 10;

impl Job {
    /// A job of quick runs.
    pub const fn new(title: &'static str, rw: &'static str, block_bytes: u32, depth: usize) -> Job {
        Job { title, rw, block_bytes, depth, quick: true }
    }

    /// This job, omitted from quick runs.
    pub const fn not_quick(self) -> Job {
        Job { quick: false, ..self }
    }

    /// This workload for a client in this process.
    pub fn load(&self) -> Load {
        Load { block_bytes: self.block_bytes, ..Load::new(self.rw, self.depth) }
    }

    /// Whether a server does the job once over the whole file before it is measured.
    ///
    /// The kernel allocates the pages of socket buffers from one processor's lists and frees them to another's. After
    /// much memory was freed, for example by the previous server, the first gigabyte of buffers is in pages that
    /// were not used recently, which a hypervisor may have reclaimed. Warming up moves that cost, about a second,
    /// out of the measurement.
    pub fn warms_up(&self) -> bool {
        self.block_bytes > LARGE_BYTES
    }
}

/// The arguments for I/O on the first `bytes` of the file or device at `path`.
pub fn on_path(path: &Path, bytes: u64) -> Vec<String> {
    let file = format!("--filename={}", path.display());
    vec!["--ioengine=io_uring".to_owned(), "--direct=1".to_owned(), file, format!("--size={bytes}")]
}

/// The arguments for I/O on the first `bytes` of the export `disk` of the NBD server at `socket`.
pub fn on_nbd(socket: &Path, bytes: u64) -> Vec<String> {
    let uri = format!("--uri=nbd+unix:///disk?socket={}", socket.display());
    vec!["--ioengine=nbd".to_owned(), uri, format!("--size={bytes}")]
}

pub struct Report {
    /// The rate, and the latency from submission to completion.
    pub run: Run,
    /// Usage of the thread that does the I/O, during the job.
    pub client: Usage,
    /// Usage of the whole process, including its start.
    pub process: Usage,
}

/// The reason why fio cannot be used as an NBD client.
pub fn lacks() -> Option<String> {
    match Command::new("fio").arg("--enghelp").output() {
        Err(e) => Some(format!("fio: {e}; install the package fio")),
        Ok(output) if !String::from_utf8_lossy(&output.stdout).lines().any(|line| line.trim() == "nbd") => {
            Some("fio was built without the engine nbd; install Debian's package fio".to_owned())
        }
        Ok(_) => None,
    }
}

/// Runs `job` on the target that the arguments `target` select, for `length`; without a length, for one pass over it.
///
/// There is no ramp time: fio would not count its I/Os, but the server's usage would include them.
pub fn run(target: &[String], job: &Job, length: Option<Duration>, scratch: &Path) -> Result<Report> {
    let output = scratch.join("fio.json");
    let mut command = Command::new("fio");
    // With --thread, fio is a single process, so killing it leaves nothing running.
    command.args(["--name=job", "--thread", "--norandommap", "--randrepeat=0"]).args(target);
    command.arg(format!("--rw={}", job.rw)).arg(format!("--bs={}", job.block_bytes));
    command.arg(format!("--iodepth={}", job.depth));
    let mut limit = EXIT_WAIT;
    if let Some(length) = length {
        command.args(["--time_based", &format!("--runtime={}ms", length.as_millis())]);
        limit += length;
    }
    command.args(["--output-format=json", &format!("--output={}", output.display())]);
    // The engine nbd prints to standard output, which is not needed.
    let process = Child::start(command, Stdio::null())?.wait(limit)?;
    let text = std::fs::read_to_string(&output)?;
    parse(&text, job.rw.contains("write"), process).map_err(|e| format!("fio: {e}").into())
}

fn parse(text: &str, write: bool, process: Usage) -> Result<Report> {
    // fio may print warnings before the JSON.
    let json = text.find('{').map_or("", |start| &text[start..]);
    let document: Value = serde_json::from_str(json)?;
    let job = &document["jobs"][0];
    let number = |value: &Value, what: &str| {
        value.as_f64().ok_or_else(|| crate::Error::from(format!("the report contains no {what}")))
    };
    ensure(number(&job["error"], "error")? == 0.0, || format!("error {}", job["error"]))?;
    let side = &job[if write { "write" } else { "read" }];
    let ios = number(&side["total_ios"], "total_ios")?;
    ensure(ios > 0.0, || "no I/O completed".into())?;
    let percentile = |key: &str| number(&side["clat_ns"]["percentile"][key], "percentiles");
    let seconds = number(&job["job_runtime"], "job_runtime")? / 1e3;
    let percent = number(&job["usr_cpu"], "usr_cpu")? + number(&job["sys_cpu"], "sys_cpu")?;
    Ok(Report {
        run: Run::new(ios as u64)
            .with(Metric::Iops, number(&side["iops"], "iops")?)
            .with(Metric::LatencyMeanUs, number(&side["lat_ns"]["mean"], "latency")? / 1e3)
            .with(Metric::LatencyP50Us, percentile("50.000000")? / 1e3)
            .with(Metric::LatencyP99Us, percentile("99.000000")? / 1e3)
            .with(Metric::LatencyP999Us, percentile("99.900000")? / 1e3),
        client: Usage {
            cpu: Duration::from_secs_f64(percent / 100.0 * seconds),
            context_switches: number(&job["ctx"], "ctx")? as u64,
        },
        process,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_parsed_after_other_output_of_fio() {
        let text = r#"fio: some remark
            {"jobs": [{"error": 0, "job_runtime": 2000, "usr_cpu": 10.0, "sys_cpu": 15.0, "ctx": 40,
            "read": {"total_ios": 0}, "write": {"total_ios": 1000, "iops": 500.0, "lat_ns": {"mean": 2000.0},
            "clat_ns": {"percentile": {"50.000000": 1000, "99.000000": 3000, "99.900000": 4000}}}}]}"#;
        let report = parse(text, true, Usage::default()).unwrap();
        let values: Vec<f64> = report.run.values.iter().map(|(_, value)| *value).collect();
        assert_eq!((report.run.ios, values), (1000, vec![500.0, 2.0, 1.0, 3.0, 4.0]));
        assert_eq!((report.client.cpu, report.client.context_switches), (Duration::from_millis(500), 40));
        assert!(parse(text, false, Usage::default()).is_err(), "nothing was read");
        assert!(parse("", true, Usage::default()).is_err());
    }
}
