//! The HTML page: the results of each table.

use super::html::{base64, escape, table as html_table};
use super::plots::{self, ratio_and_spread, times};
use crate::metric::Metric;
use crate::result::{Comparison, Effect, Figure, Results, Table};
use crate::summary::{self, Judged, mechanisms, name, number, targets};

pub const PAGE: &str = "index.html";
pub(super) const JSON: &str = "results.json";
pub(super) const CSV: &str = "results.csv";

/// Marks a page as one of blkq bench, which a later report may replace.
pub(super) const GENERATOR: &str = "<meta name=\"generator\" content=\"blkq bench\">";

/// Formats the whole page, which loads nothing and runs no scripts. `json` and `csv` are embedded as downloads. The
/// colours of the light and the dark theme are at the top of the style sheet.
pub fn page(results: &Results, json: &str, csv: &str) -> String {
    let machine = &results.machine;
    format!(
        include_str!("page.html"),
        generator = GENERATOR,
        style = include_str!("style.css"),
        date = date(results.started_unix),
        pace = if results.quick { "quick run, " } else { "" },
        seconds = results.elapsed_seconds,
        version = escape(&results.version),
        processor = escape(&machine.processor),
        processors = machine.processors,
        virtual_machine = if machine.virtual_machine { ", a virtual machine" } else { "" },
        memory_gib = machine.memory_bytes as f64 / f64::from(1 << 30),
        kernel = escape(&machine.kernel),
        file_system = escape(machine.file_system.as_deref().unwrap_or("no table used a file")),
        clock_source = escape(&machine.clock_source),
        load = machine.load,
        json = download(JSON, "application/json", "Figures as JSON", json),
        csv = download(CSV, "text/csv", "as CSV", csv),
        cards = results.tables.iter().map(card).collect::<String>(),
        sections = results.tables.iter().map(section).collect::<String>(),
    )
}

fn download(name: &str, kind: &str, label: &str, text: &str) -> String {
    let data = base64(text.as_bytes());
    format!("<a download=\"{name}\" href=\"data:{kind};charset=utf-8;base64,{data}\">{label}</a>\n")
}

/// A card with the main result of the table.
fn card(table: &Table) -> String {
    let (big, small) = match summary::headline(table) {
        Some((_, effect)) => {
            let Effect { published_ratio, name, metric, .. } = effect;
            let published = published_ratio.map_or(String::new(), |r| format!(", published {}", times(r)));
            (ratio_and_spread(effect), format!("{name}: {}{published}", metric.label()))
        }
        None => table
            .targets
            .first()
            .map_or_else(Default::default, |target| (number(target.value), target.name.clone())),
    };
    let id = name(&table.name);
    let count = |done: usize, all: usize, what: &str, good: &str| {
        let class = if done == all { "good" } else { "bad" };
        let counted = format!("<span class=\"pill {class}\">{done} of {all} {what} {good}</span>");
        if all == 0 { String::new() } else { counted }
    };
    let seen = table.mechanisms.iter().filter(|mechanism| mechanism.seen).count();
    let reached = table.targets.iter().filter(|target| target.reached).count();
    format!(
        "<a class=\"card\" href=\"#{id}\"><b>{id}</b><strong>{}</strong><span>{}</span>\
         <span class=\"pills\">{}{}</span></a>\n",
        escape(&big),
        escape(&small),
        count(seen, table.mechanisms.len(), "mechanisms", "seen"),
        count(reached, table.targets.len(), "targets", "reached"),
    )
}

fn section(table: &Table) -> String {
    let id = name(&table.name);
    let mut html = format!("<section id=\"{id}\">\n<h2>{}</h2>\n", escape(&table.title));
    if let Some((comparison, effect)) = summary::headline(table) {
        let Effect { feature, base, metric, published_ratio, .. } = effect;
        let published =
            published_ratio.map_or(String::new(), |r| format!(", where {} was published", times(r)));
        html += &format!(
            "<p class=\"verdict\"><strong>{}</strong> {}{published}: {} relative to {}; {}.</p>\n",
            escape(&ratio_and_spread(effect)),
            escape(metric.label()),
            escape(feature),
            escape(base),
            escape(&comparison.title),
        );
    }
    html += &format!("<div class=\"plots\">\n{}</div>\n", plots::figures(table));
    html += &format!(
        "<div class=\"facts\">\n{}{}{}</div>\n",
        published(table),
        judged("Mechanisms", ["Claim", "counted", "expected"], ["seen", "not seen"], mechanisms(table)),
        judged("Targets", ["Target", "measured", "wanted"], ["reached", "missed"], targets(table))
    );
    if !table.comparisons.is_empty() {
        html += "<h3>Figures</h3>\n";
    }
    html += &table.comparisons.iter().map(comparison).collect::<String>();
    html += &list("Left out", &table.left_out);
    html += &list("Notes", &table.notes);
    html + "</section>\n"
}

fn row(cells: &[&str]) -> Vec<String> {
    cells.iter().map(|cell| escape(cell)).collect()
}

fn published(table: &Table) -> String {
    let Some(published) = &table.published else { return String::new() };
    let mut rows = vec![row(&[&published.unit, "base", "feature", "ratio", "measured here"])];
    for (published_row, effect) in summary::published_beside(table, published) {
        rows.push(row(&[
            &published_row.name,
            &summary::exact(published_row.base),
            &summary::exact(published_row.feature),
            &times(published_row.ratio()),
            &effect.map_or("-".to_owned(), ratio_and_spread),
        ]));
    }
    format!(
        "<div><h3>Published</h3>\n<p>{}. {}.</p>\n{}</div>\n",
        escape(&published.origin),
        escape(&published.setting),
        html_table(&rows)
    )
}

/// A table of values with their bounds and verdicts, in the words for a good and a bad one. A verdict is a coloured word,
/// because colour alone would not be accessible. Without values there is no table.
fn judged(title: &str, heading: [&str; 3], [good, bad]: [&str; 2], values: Vec<Judged>) -> String {
    if values.is_empty() {
        return String::new();
    }
    let mut rows = vec![row(&[&heading[..], &[""]].concat())];
    for ([name, value, bound], is_good) in values {
        let bound = bound.replace(">=", "\u{2265}").replace("<=", "\u{2264}");
        let (class, word) = if is_good { ("good", good) } else { ("bad", bad) };
        let mut cells = row(&[&name, &value, &bound]);
        cells.push(format!("<span class=\"pill {class}\">{word}</span>"));
        rows.push(cells);
    }
    format!("<div><h3>{title}</h3>\n{}</div>\n", html_table(&rows))
}

fn comparison(comparison: &Comparison) -> String {
    let metrics = summary::metrics(comparison);
    let labels: Vec<&str> = metrics.iter().map(|metric| metric.label()).collect();
    let mut rows = vec![row(&[&[""], &labels[..]].concat())];
    for case in &comparison.cases {
        let cell = |metric: &Metric| match case.find(*metric) {
            Some(Figure { median, min, max, .. }) => {
                let range = format!("{} to {}", metric.format(*min), metric.format(*max));
                let range = if min == max { String::new() } else { format!("<small>{range}</small>") };
                format!("{}{range}", metric.format(*median))
            }
            None => "-".to_owned(),
        };
        rows.push(std::iter::once(escape(&case.name)).chain(metrics.iter().map(cell)).collect());
    }
    let mut html = format!(
        "<h4>{} <small>median of {} rounds of {} s, smallest to largest</small></h4>\n{}",
        escape(&comparison.title),
        comparison.rounds,
        comparison.seconds,
        html_table(&rows)
    );
    if !comparison.effects.is_empty() {
        let mut rows = vec![row(&["Comparison", "metric", "measured ratio", "published ratio"])];
        rows.extend(comparison.effects.iter().map(|effect| {
            let published = effect.published_ratio.map(times);
            let mut cells = row(&[
                &effect.name,
                effect.metric.label(),
                &ratio_and_spread(effect),
                published.as_deref().unwrap_or("-"),
            ]);
            cells[0] +=
                &format!("<small>{} relative to {}</small>", escape(&effect.feature), escape(&effect.base));
            cells
        }));
        html += &html_table(&rows);
    }
    html
}

fn list(title: &str, lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let items: String = lines.iter().map(|line| format!("<li>{}</li>\n", escape(line))).collect();
    format!("<h3>{title}</h3>\n<ul>\n{items}</ul>\n")
}

/// Formats a time as `2026-11-21 10:27` in UTC.
fn date(unix: u64) -> String {
    let minutes = unix % 86_400 / 60;
    // The civil_from_days algorithm of Howard Hinnant: years begin in March, so that a leap day is the last of its year.
    let days = unix / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let (month, years_later) =
        if month_from_march < 10 { (month_from_march + 3, 0) } else { (month_from_march - 9, 1) };
    let year = era * 400 + year_of_era + years_later;
    format!("{year}-{month:02}-{day:02} {:02}:{:02}", minutes / 60, minutes % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_gregorian_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00");
        assert_eq!(date(951_827_640), "2000-02-29 12:34");
        assert_eq!(date(1_798_761_599), "2026-12-31 23:59");
    }

    #[test]
    fn names_in_the_results_are_escaped() {
        let results: Results = serde_json::from_str(include_str!("../../tests/hostile.json")).unwrap();
        let page = page(&results, "", "");
        assert!(!page.contains("<script") && !page.contains("<img"), "something was not escaped");
        assert!(page.contains("&lt;script&gt;"));
    }
}
