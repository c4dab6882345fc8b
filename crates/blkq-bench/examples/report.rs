//! Builds the report of `blkq bench --report` from the JSON of an earlier `blkq bench --json`:
//! `cargo run -p blkq-bench --example report -- results.json DIR`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [json, directory] = words.as_slice() else {
        eprintln!("usage: report RESULTS.json DIR");
        return ExitCode::from(2);
    };
    let made = std::fs::read_to_string(json)
        .map_err(blkq_bench::Error::from)
        .and_then(|text| Ok(serde_json::from_str(&text)?))
        .and_then(|results| {
            let directory = Path::new(directory);
            blkq_bench::report::check(directory)?;
            blkq_bench::report::write(&results, directory)
        });
    match made {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("report: {json}: {e}");
            ExitCode::FAILURE
        }
    }
}
