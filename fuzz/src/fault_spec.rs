//! Fault specs: a spec that was formatted must parse to the same rules, and the rules must have the specified effect.
//! Whatever fails, every bio must complete once, at the latest when the rules are removed.
//!
//! Input: a mode byte; then the text of a spec (even), or choices from which a spec and its text are generated (odd).
//! Bios of four bytes each follow the choices, or the first NUL of the text.
// Contract: bounded-input

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use blkq::drivers::ram::Ram;
use blkq::{Bio, BioFlags, Disk, IoBuffer, LocalQueue, Operation, Sector, Status};
use blkq_drivers::fault::{Effect, Fault, FaultSpec, Rule};

const SIZE: u64 = 64 << 10;
const STATUSES: [(&str, Status); 4] = [
    ("EIO", Status::Io),
    ("ENOSPC", Status::NoSpace),
    ("EAGAIN", Status::Again),
    ("EROFS", Status::ReadOnly),
];
const UNITS: [(&str, u64); 4] = [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000)];
/// Maximum delay, and maximum time for which a request is stuck.
const TIME_MAX_NS: u64 = 3_600_000_000_000;

fn time(u: &mut Unstructured<'_>) -> Result<(String, u64)> {
    let (unit, ns) = *u.choose(&UNITS)?;
    let number = u.int_in_range(1..=3600)?;
    Ok((format!("{number}{unit}"), number * ns))
}

fn rule(u: &mut Unstructured<'_>) -> Result<(String, Rule)> {
    let (mut text, effect) = match u.int_in_range(0..=7)? {
        0 => {
            let (name, status) = *u.choose(&STATUSES)?;
            (format!("error={name}"), Effect::Error(status))
        }
        1 => {
            let (name, status) = *u.choose(&STATUSES)?;
            (format!("short={name}"), Effect::Short(status))
        }
        2 => ("torn".to_owned(), Effect::Torn),
        3 => ("misdirect".to_owned(), Effect::Misdirect),
        4 => ("corrupt".to_owned(), Effect::Corrupt),
        5 => ("lose".to_owned(), Effect::Lose),
        6 => {
            let (text, mean_ns) = time(u)?;
            (format!("delay={text}"), Effect::Delay { mean_ns, p99_ns: None })
        }
        _ => {
            let (text, ns) = time(u)?;
            (format!("stuck={text}"), Effect::Stuck(ns))
        }
    };
    let operations = Operation::ALL.map(|operation| effect.concerns(operation));
    let mut rule =
        Rule { effect, operations, range: 0..u64::MAX, rate: 1.0, after: 0, count: u64::MAX, file: None };
    for _ in 0..u.int_in_range(0..=3)? {
        match u.int_in_range(0..=5)? {
            0 => {
                let operation = *u.choose(&Operation::ALL)?;
                if effect.concerns(operation) {
                    rule.operations = Operation::ALL.map(|other| other == operation);
                    text += &format!(",op={}", operation.name());
                }
            }
            1 => {
                let from = u64::from(u.arbitrary::<u16>()?);
                let to = from + 1 + u64::from(u.arbitrary::<u16>()?);
                rule.range = from..to;
                text += &format!(",range={from}-{to}");
            }
            2 => {
                let whole = u.int_in_range(1..=1000u32)?;
                rule.rate = 1.0 / f64::from(whole);
                text += &format!(",rate=1/{whole}");
            }
            3 => {
                rule.after = u.arbitrary()?;
                text += &format!(",after={}", rule.after);
            }
            4 => {
                rule.count = u.arbitrary()?;
                text += &format!(",count={}", rule.count);
            }
            _ => {
                if let Effect::Delay { mean_ns, .. } = rule.effect {
                    let p99_ns = (mean_ns * u.int_in_range(1..=14)?).min(TIME_MAX_NS);
                    rule.effect = Effect::Delay { mean_ns, p99_ns: Some(p99_ns) };
                    text += &format!(",p99={p99_ns}ns");
                }
            }
        }
    }
    Ok((text, rule))
}

/// Generates rules and a seed, checks that their text is parsed into the same, and returns the spec.
fn spec(u: &mut Unstructured<'_>) -> Result<FaultSpec> {
    let seed: Option<u64> = u.arbitrary()?;
    let rules: Vec<(String, Rule)> = (0..u.int_in_range(1..=4)?).map(|_| rule(u)).collect::<Result<_>>()?;
    let mut parts: Vec<String> = rules.iter().map(|(text, _)| text.clone()).collect();
    parts.extend(seed.map(|seed| format!("seed={seed}")));
    let text = parts.join("; ");
    let spec: FaultSpec = text.parse().unwrap_or_else(|e| panic!("{text}: {e}"));
    assert_eq!(spec.seed, seed);
    assert_eq!(spec.rules, rules.into_iter().map(|(_, rule)| rule).collect::<Vec<_>>(), "{text}");
    Ok(spec)
}

fn check_spec(spec: &FaultSpec) {
    assert_eq!(spec.to_string().parse::<FaultSpec>().as_ref().ok(), Some(spec));
    for rule in &spec.rules {
        assert!((0.0..=1.0).contains(&rule.rate) && !rule.range.is_empty());
        for operation in Operation::ALL {
            assert!(!rule.operations[operation as usize] || rule.effect.concerns(operation));
        }
        if let Effect::Delay { mean_ns, p99_ns } = rule.effect {
            assert!((1..=TIME_MAX_NS).contains(&mean_ns));
            assert!(p99_ns.is_none_or(|p99_ns| (mean_ns..=TIME_MAX_NS).contains(&p99_ns)));
        }
    }
}

fn bio(words: &[u8], number: u64) -> Bio {
    let (sector, blocks) = (Sector(u64::from(words[1]) % 128), u64::from(words[2]) % 16 + 1);
    let data = || IoBuffer::zeroed(blocks as usize * 512);
    let plain = |operation| Bio {
        operation,
        flags: BioFlags::empty(),
        sector,
        sectors: blocks,
        data: blkq::Data::None,
        user_data: number,
    };
    let bio = match words[0] % 5 {
        0 => Bio::read(sector, data(), number),
        1 => Bio::write(sector, data(), number),
        2 => plain(Operation::Discard),
        3 => plain(Operation::WriteZeroes),
        _ => Bio::flush(number),
    };
    let fua = bio.operation.is_write() && words[3] & 1 != 0;
    bio.with_flags(if fua { BioFlags::FUA } else { BioFlags::empty() })
}

fn take(queue: &mut LocalQueue, completed: &mut [u32]) {
    for completion in queue.completions() {
        completed[completion.user_data as usize] += 1;
    }
}

/// Runs `bios` on a device with these faults, then removes the faults.
fn load(spec: FaultSpec, bios: &[u8]) {
    // Not with trigger files, which would make the result depend on the file system, or with panics, which the fuzzer
    // would report as findings.
    if spec.rules.iter().any(|rule| rule.file.is_some() || rule.effect == Effect::Panic) {
        return;
    }
    let ram = Ram::new(SIZE, 512, false).expect("memory");
    let fault = Fault::new(Arc::new(ram), spec).expect("a device");
    let disk = Disk::builder(Box::new(fault)).depth(4).build().expect("a disk");
    let mut queue = disk.open_queue(0).expect("a queue");
    let count = bios.chunks_exact(4).len().min(16);
    let mut completed = vec![0; count];
    for (number, words) in bios.chunks_exact(4).take(count).enumerate() {
        queue.submit(bio(words, number as u64)).expect("room for a few");
        if words[3] & 2 != 0 {
            queue.poll();
            take(&mut queue, &mut completed);
        }
    }
    queue.poll();
    disk.set_driver(&FaultSpec::default()).expect("removing faults succeeds");
    while queue.in_flight() > 0 {
        queue.poll();
        take(&mut queue, &mut completed);
    }
    take(&mut queue, &mut completed);
    assert!(completed.iter().all(|times| *times == 1), "each bio completes once: {completed:?}");
    assert_eq!(disk.stats().in_flight, [0, 0]);
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else { return };
    let (spec, bios) = if mode % 2 == 0 {
        let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
        match String::from_utf8_lossy(&rest[..end]).parse::<FaultSpec>() {
            Ok(spec) => (spec, rest.get(end + 1..).unwrap_or_default()),
            Err(error) => return assert!(!error.to_string().is_empty()),
        }
    } else {
        let mut u = Unstructured::new(rest);
        let Ok(spec) = spec(&mut u) else { return };
        (spec, u.take_rest())
    };
    check_spec(&spec);
    load(spec, bios);
}
