//! A strict parser of the Prometheus exposition format 0.0.4. Everything that a scraper might reject is an error,
//! and so is a name that breaks the naming conventions.
#![allow(clippy::unwrap_used, dead_code, reason = "for tests, each of which uses its part")]

use std::collections::{BTreeMap, BTreeSet};

pub type Labels = BTreeMap<String, String>;

#[derive(Debug)]
pub struct Sample {
    pub name: String,
    pub labels: Labels,
    pub value: f64,
}

#[derive(Debug)]
pub struct Family {
    pub name: String,
    pub help: String,
    pub kind: String,
    pub samples: Vec<Sample>,
}

impl Family {
    /// The labels of the samples, without the label of the device.
    pub fn labels(&self) -> BTreeSet<String> {
        let names = self.samples.iter().flat_map(|sample| sample.labels.keys());
        names.filter(|name| !["device", "le"].contains(&name.as_str())).cloned().collect()
    }
}

#[derive(Debug, Default)]
pub struct Exposition {
    pub families: Vec<Family>,
}

impl Exposition {
    /// The value of the sample `name` with `labels`, if there is exactly one.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let all = self.families.iter().flat_map(|family| &family.samples);
        let has = |sample: &&Sample| {
            sample.name == name
                && labels.iter().all(|(k, v)| sample.labels.get(*k).map(String::as_str) == Some(*v))
        };
        let mut found = all.filter(has);
        let value = found.next()?.value;
        assert!(found.next().is_none(), "{name} {labels:?} is not one sample");
        Some(value)
    }
}

/// Parses `text`, or returns a description of the first error.
pub fn check(text: &str) -> Result<Exposition, String> {
    if !text.ends_with('\n') {
        return Err("the last line has no newline".into());
    }
    let mut exposition = Exposition::default();
    let mut series = BTreeSet::new();
    let mut lines = text[..text.len() - 1].split('\n').peekable();
    while let Some(line) = lines.next() {
        let wrong = |why: &str| Err(format!("{why}: {line:?}"));
        let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) else {
            return wrong("not the HELP of a family");
        };
        let Some(kind) = lines.next().and_then(|line| line.strip_prefix(&format!("# TYPE {name} "))) else {
            return wrong("no TYPE after HELP");
        };
        if !is_name(name, ":") || exposition.families.iter().any(|family| family.name == name) {
            return wrong("no name, or not the first of it");
        }
        if help.is_empty() || help.contains('\\') || help.trim() != help {
            return wrong("a strange HELP");
        }
        check_name(name, kind)?;
        let mut samples = Vec::new();
        while let Some(line) = lines.next_if(|line| !line.starts_with('#')) {
            let sample = parse(line).ok_or_else(|| format!("no sample: {line:?}"))?;
            let suffix = sample.name.strip_prefix(name).unwrap_or("?");
            let suffixes: &[&str] = if kind == "histogram" { &["_bucket", "_sum", "_count"] } else { &[""] };
            if !suffixes.contains(&suffix) {
                return wrong(&format!("{line:?} is not of the family"));
            }
            if kind == "counter" && !(sample.value >= 0.0 && sample.value.is_finite()) {
                return wrong(&format!("{line:?} counts nothing"));
            }
            if !series.insert((sample.name.clone(), sample.labels.clone())) {
                return wrong(&format!("{line:?} comes twice"));
            }
            samples.push(sample);
        }
        if samples.is_empty() {
            return wrong("a family without samples");
        }
        if kind == "histogram" {
            check_histogram(name, &samples)?;
        } else if samples.iter().any(|sample| !sample.labels.keys().eq(samples[0].labels.keys())) {
            return wrong("samples with different labels");
        }
        let (name, help, kind) = (name.to_owned(), help.to_owned(), kind.to_owned());
        exposition.families.push(Family { name, help, kind, samples });
    }
    Ok(exposition)
}

fn check_name(name: &str, kind: &str) -> Result<(), String> {
    let has_suffix = |suffixes: &[&str]| suffixes.iter().any(|suffix| name.ends_with(suffix));
    let fits = match kind {
        "counter" => name.ends_with("_total"),
        "gauge" | "histogram" => !has_suffix(&["_total", "_count", "_sum", "_bucket"]),
        _ => false,
    };
    let unit = ["ns", "us", "ms", "ms_total", "ns_total", "us_total", "kb", "mb", "sectors", "sectors_total"];
    let base_units = !unit.iter().any(|unit| name.ends_with(&format!("_{unit}")));
    if fits && base_units { Ok(()) } else { Err(format!("{name} is no name of a {kind}")) }
}

fn check_histogram(name: &str, samples: &[Sample]) -> Result<(), String> {
    let mut groups: BTreeMap<Labels, Vec<&Sample>> = BTreeMap::new();
    for sample in samples {
        let mut labels = sample.labels.clone();
        labels.remove("le");
        groups.entry(labels).or_default().push(sample);
    }
    for (labels, samples) in groups {
        let wrong = |why: &str| Err(format!("{name} {labels:?}: {why}"));
        let of = |suffix: &str| {
            let name = format!("{name}{suffix}");
            samples.iter().filter(move |sample| sample.name == name).collect::<Vec<_>>()
        };
        let (buckets, sums, counts) = (of("_bucket"), of("_sum"), of("_count"));
        if sums.len() != 1
            || counts.len() != 1
            || sums.iter().chain(&counts).any(|s| s.labels.contains_key("le"))
        {
            return wrong("not one sum and one count");
        }
        let mut before = (f64::NEG_INFINITY, 0.0);
        for bucket in &buckets {
            let le = bucket.labels.get("le").and_then(|le| number(le)).unwrap_or(f64::NAN);
            if !(le > before.0 && bucket.value >= before.1) {
                return wrong("buckets that are not cumulative");
            }
            before = (le, bucket.value);
        }
        if before != (f64::INFINITY, counts[0].value) {
            return wrong("the last bucket is not all");
        }
    }
    Ok(())
}

fn is_name(text: &str, more: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_' || more.contains(c);
    text.chars().all(good) && text.chars().next().is_some_and(|c| !c.is_ascii_digit())
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        "NaN" => Some(f64::NAN),
        _ if text.bytes().all(|b| b.is_ascii_digit() || b"+-.eE".contains(&b)) => text.parse().ok(),
        _ => None,
    }
}

/// Parses `name{label="value",...} value`. blkq always writes labels, and no timestamps.
fn parse(line: &str) -> Option<Sample> {
    let (name, mut rest) = line.split_once('{')?;
    let mut labels = Labels::new();
    loop {
        let (label, after) = rest.split_once("=\"")?;
        let (text, after) = quoted(after)?;
        if !is_name(label, "") || label.starts_with("__") || labels.insert(label.to_owned(), text).is_some() {
            return None;
        }
        match after.strip_prefix(',') {
            Some(after) => rest = after,
            None => {
                let value = number(after.strip_prefix("} ")?)?;
                return is_name(name, ":").then(|| Sample { name: name.to_owned(), labels, value });
            }
        }
    }
}

/// The text before the closing quote, and the text after it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        value.push(match c {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => '\n',
                c @ ('\\' | '"') => c,
                _ => return None,
            },
            c => c,
        });
    }
    None
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn what_is_wrong_is_found() {
        let good = "# HELP a_total A.\n# TYPE a_total counter\na_total{d=\"x\"} 1\n";
        check(good).unwrap();
        let histogram = "# HELP h H.\n# TYPE h histogram\nh_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 2\n";
        let rest = "h_sum{d=\"x\"} 1\nh_count{d=\"x\"} 2\n";
        let whole = format!("{}{rest}", histogram.replace("{le", "{d=\"x\",le"));
        check(&whole).unwrap();
        for bad in [
            "",
            "# HELP a_total A.\n# TYPE a_total counter\na_total{d=\"x\"} 1",
            "# HELP a A.\n# TYPE a counter\na{d=\"x\"} 1\n",
            "# HELP a_ms A.\n# TYPE a_ms gauge\na_ms{d=\"x\"} 1\n",
            "# TYPE a_total counter\n# HELP a_total A.\na_total{d=\"x\"} 1\n",
            "# HELP a_total A.\n# TYPE a_total counter\na_total{d=\"x\"} -1\n",
            "# HELP a_total A.\n# TYPE a_total counter\na_total{d=\"x\"} 0x1\n",
            "# HELP a_total A.\n# TYPE a_total counter\na_total{d=\"\\x\"} 1\n",
            "# HELP a_total A.\n# TYPE a_total counter\na_total{d=\"x} 1\n",
            "# HELP a_total A.\n# TYPE a_total counter\na_total{d=\"x\"} 1\na_total{d=\"x\"} 1\n",
            "# HELP a_total A.\n# TYPE a_total counter\nb_total{d=\"x\"} 1\n",
            "# HELP a_total A.\n# TYPE a_total counter\n",
            &[good, good].concat(),
            &whole.replace("h_count{d=\"x\"} 2", "h_count{d=\"x\"} 3"),
            &whole.replace("le=\"1\"} 1", "le=\"1\"} 3"),
            &whole.replace("+Inf", "0.5"),
            &whole.replace("h_sum{d=\"x\"} 1\n", ""),
        ] {
            assert!(check(bad).is_err(), "{bad}");
        }
    }
}
